// What a rank that waits in one lane learns from what all ranks publish about both lanes.
//
// Note [lanes that wait for each other]
// Ranks that run different programs may wait for each other in different lanes: rank 0 in the
// reduce lane, because rank 1 has issued nothing there, and rank 1 in the gather lane, because rank
// 0 has issued nothing there. Each could still issue what the other one waits for, unless the
// thread that issues its work is blocked until its own lane is done. So each rank publishes that,
// too: Note [published waits] in device/host_stream.h. Then neither rank can ever go on.
//
// The ranks change what they publish while others read it. So a deadlock counts only if all of it
// is the same in two observations. Everything in it is a counter, or says that a thread is blocked.
// Between two equal observations the lanes have run the same collective all the time, and in the
// second one the threads were blocked behind it. Nothing ends that any more.
//
// A rank that is merely slow does not look like that: its thread computes, or sleeps, and is not
// blocked in a wait for a lane. If several threads of a rank have issued work, another one may
// issue what is missing, so ranks then wait until the timeout. The observations are some time
// apart, for threads that are about to issue their first work. A wait for copies beside the lane is
// not published, because the copies may still end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/peer.h"

namespace fsdp {

// What all ranks do, in a sentence.
std::string what_ranks_do(const std::vector<Peer>& peers);

// For one wait of one rank.
class LaneWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `peers` are all ranks in order, this one included, and outlive this object. What would end the
  // wait has to stay unchanged for the time `unchanged`.
  LaneWatch(const std::vector<Peer>& peers, std::chrono::milliseconds unchanged)
      : peers_(peers), unchanged_(unchanged) {}

  // Observes all ranks. Throws if ranks wait for each other for ever, or if a rank has failed in
  // either lane and this wait has not ended since.
  void look(Time now);

 private:
  // What a rank publishes about one lane.
  struct LaneState {
    bool is_idle() const { return issued == ended; }
    bool is_busy() const { return begun != ended; }
    bool operator==(const LaneState& other) const;

    std::uint64_t blocked;
    std::uint64_t issuer;
    std::uint32_t issued;
    std::uint32_t begun;
    std::uint32_t ended;
    std::uint32_t posted;
  };
  struct RankState {
    bool operator==(const RankState& other) const;
    // Whether the rank can only issue something after the collective that `lane` runs.
    bool is_stuck_in(int lane) const;

    LaneState lanes[2];
  };
  // Two ranks that wait for each other; `ranks[lane]` is stuck in `lane`.
  struct Deadlock {
    bool operator==(const Deadlock& other) const;

    int ranks[2] = {-1, -1};  // none
    RankState states[2] = {};
  };

  static RankState state_of(const Peer& peer);
  Deadlock find_deadlock() const;
  const Mailbox* find_failed() const;
  [[noreturn]] void throw_deadlock() const;

  const std::vector<Peer>& peers_;
  std::chrono::milliseconds unchanged_;
  Deadlock deadlock_;  // in the last observation
  Time deadlock_since_;
  const Mailbox* failed_ = nullptr;
  Time failed_since_;
};

}  // namespace fsdp
