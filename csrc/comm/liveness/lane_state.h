// The state that a rank publishes about its lanes, and the test for two ranks that wait for each
// other.
//
// Note [lanes that wait for each other]
// Ranks that run different programs may wait for each other in different lanes, while the threads
// that issue their work are blocked until their own lanes are done (Note [published waits] in
// device/host_stream.h). Then neither rank can ever go on: "Waiting" in
// docs/design/shared-memory.md.
//
// A rank's state may change while it is read. So a deadlock counts only if two observations of this
// state are equal. The state consists of counters, and of flags that say whether a thread is
// blocked. Between two equal observations the lanes have run the same collective all the time, and
// in the second one the threads were blocked behind it. Nothing can end this state.
//
// If several threads of a rank issue work, one that is not blocked may issue what is missing. So
// then ranks wait until the timeout. The observations are some time apart, because a thread may be
// about to issue its first work. A wait for copies beside the lane is not published, because the
// copies may still end.
//
// In its first iteration, a rank has issued gathers in forward, and no reduction yet. Its reduce
// lane then has no issuing thread. The test assumes that this will be the thread that is blocked in
// the gather lane. It would be wrong only if another thread issued the rank's first reduction.
#pragma once

#include <cstdint>
#include <string>

#include "comm/shared_memory/mailbox.h"

namespace fsdp {

// The state of one lane of a rank.
struct LaneState {
  bool is_idle() const { return issued == ended; }
  bool is_busy() const { return begun != ended; }
  bool operator==(const LaneState& other) const;

  std::uint64_t blocked = Issuer::kNobody;
  std::uint64_t issuer = Issuer::kNobody;
  std::uint32_t issued = 0;
  std::uint32_t begun = 0;
  std::uint32_t ended = 0;
  std::uint32_t posted = 0;
};

struct RankState {
  bool operator==(const RankState& other) const;
  // Whether the rank can only issue something after the collective that `lane` runs.
  bool is_stuck_in(int lane) const;

  LaneState lanes[2];
};

// Reads what a rank publishes in the mailboxes of its lanes.
RankState rank_state_in(const Mailbox* const (&mailboxes)[2]);

// Whether a rank that is stuck in lane 0 and one that is stuck in lane 1 wait for each other. A
// collective can only end if all ranks have posted all of its rounds. So in each lane the rank that
// is stuck there has to be one round ahead of the other rank.
bool wait_for_each_other(const RankState& stuck_in_0, const RankState& stuck_in_1);

// The error of all ranks. `activities` is a sentence about what the ranks do.
std::string account_of_deadlock(int first_rank, int second_rank, const std::string& activities);

}  // namespace fsdp
