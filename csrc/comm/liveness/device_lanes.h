// The oldest unfinished collective of each lane of a GPU, for comm/liveness/deadlock_watch.h.
//
// Note [lanes of a GPU]
// On a GPU, a rank is stuck in a lane if the oldest collective of the other lane comes behind the
// oldest one of this lane: Note [what work comes behind]. That alone is common. Ranks wait for each
// other if one of them is stuck in each lane and both have the same oldest collectives: each lane
// then needs both ranks, and one of them gets there only through the other lane.
//
// This follows from the issued work alone, so a rank that is slow is never taken for a deadlock,
// and ranks need not look at the same time: "Ranks that wait for each other" in
// docs/design/cuda.md. If a host blocks, such as in loss.item(), before it issues work that other
// ranks wait for, they wait until the timeout. The host does not see the collectives of a CUDA
// graph's replays, so a lane that was captured in one is not compared any more.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "comm/liveness/deadlock_watch.h"

namespace fsdp {

class DeviceLanes final : public WatchedLanes {
 public:
  // A collective that was issued and has not ended.
  struct Collective {
    std::uint32_t number = 0;  // in its lane; 0: there is none
    std::uint32_t behind = 0;  // the collective of the other lane that it comes behind; 0: none
    std::string what;
  };

  // The thread that watches `lane` reports its oldest collective.
  void publish(int lane, Collective oldest);

  RankState state() const override;
  std::string label(int lane) const override;

 private:
  mutable std::mutex mutex_;
  Collective oldest_[2];
};

}  // namespace fsdp
