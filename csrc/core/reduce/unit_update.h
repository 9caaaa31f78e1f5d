// How an attached optimizer updates a unit's shard in backward.
//
// Note [updates in backward]
// An attached optimizer (fsdp_ext/optim/attached.py) updates a unit as soon as its gradients are
// reduced, while backward computes gradients of other units. The update reads .grad of the sharded
// parameters, and then sets it to None. On a GPU, the update is issued to the stream of the
// reduction, before the bucket's `reduced` event is recorded. On the host, the update runs on
// backward's thread: on the lane's, Python might free a model, and freeing a model waits for the
// lane's thread. Before the third bucket is reduced, the update of the first one is finished. If
// this rank did not use all parameters of a unit, the unit is updated at the end of backward (Note
// [parameters that some ranks do not use] in core/agree/rank_exchange.h). Some updates first
// compute a norm of the unit's gradients over all ranks. So ranks compute the norms of a bucket's
// units in the order of reductions, before they update any of them, and also for units whose
// gradients are missing on this rank: other ranks may have them. Backward raises if a unit was
// updated after its forward, because the gradient would belong to other weights, and if an updated
// unit gets more gradients in the same backward. After a failed backward, units that were not
// updated lose their gradients. docs/design/memory.md says what this saves.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace fsdp {

class UnitUpdate {
 public:
  virtual ~UnitUpdate() = default;

  // run() updates the parameters that have a gradient. run() and measure() issue GPU work to
  // `stream`; if it is null, the gradients are complete, and the work runs on the calling thread.
  // Both may throw.
  virtual void run(Stream* stream) = 0;
  // Called before run() if measures(), with the other ranks.
  virtual void measure(Stream* /*stream*/) {}
  virtual bool measures() const { return false; }
};

struct UpdateState {
  std::uint64_t count = 0;       // updates so far
  std::uint64_t in_forward = 0;  // updates before the last forward
  bool is_awaited = false;       // the reduced gradients have not been used yet
  bool awaits_measure = false;   // measure() is still to be called
};

}  // namespace fsdp
