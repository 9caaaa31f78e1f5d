// Watches the published state of both lanes of all ranks, for a rank that waits in one lane. See
// Note [lanes that wait for each other].
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/liveness/lane_state.h"
#include "comm/shared_memory/peer.h"

namespace fsdp {

// Describes the activity of all ranks in a sentence.
std::string what_ranks_do(const std::vector<Peer>& peers);

// Serves one wait of one rank.
class LaneWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `peers` are all ranks in order, this one included, and outlive this object. A reason to end the
  // wait has to stay unchanged for the time `unchanged`.
  LaneWatch(const std::vector<Peer>& peers, std::chrono::milliseconds unchanged)
      : peers_(peers), unchanged_(unchanged) {}

  // Observes all ranks. Throws if ranks wait for each other for ever, or if a rank has failed in
  // either lane and this wait has not ended since.
  void look(Time now);

 private:
  // Two ranks that wait for each other; `ranks[lane]` is stuck in `lane`.
  struct Deadlock {
    bool operator==(const Deadlock& other) const;

    int ranks[2] = {-1, -1};  // none
    RankState states[2] = {};
  };

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
