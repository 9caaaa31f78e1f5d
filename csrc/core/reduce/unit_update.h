// How an attached optimizer updates a unit's shard in backward.
//
// Note [updates in backward]
// An attached optimizer (fsdp_ext/optim/attached.py) updates a unit as soon as its gradients are
// reduced, while backward computes gradients of other units. The update reads .grad of the sharded
// parameters, and then sets it to None.
// On a GPU, the update is issued to the stream of the reduction. The bucket's `reduced` event is
// recorded after it, so a wait for the reduction includes the update. On the host, the update runs
// on backward's thread and not on the lane's. On the lane's thread, Python might free a model, and
// freeing a model waits for the lane's thread.
// Two buckets have gradients at a time: before the third one is reduced, the update of the first
// one is finished. The host runs it then. A GPU waits for it and lends the gradients' memory (Note
// [lent gradients] in core/reduce/reducer.h).
// If this rank did not use all parameters of a unit, the unit is updated at the end of backward,
// because other ranks may have used them (Note [parameters that some ranks do not use] in
// core/agree/backward_exchange.h).
// An update may have to measure the gradients together with other ranks, for example for a norm.
// Ranks may update units in different orders, so the measures come first: all updated units of a
// bucket are measured before one of them is updated, also those of which this rank misses
// gradients. Their flat gradients are complete, with zeros where no rank had a gradient. So all
// ranks measure in the order of reductions.
// Backward raises if a unit was updated after its forward, because the gradient would belong to
// other weights. It also raises if an updated unit gets more gradients in the same backward,
// because each update would see only a part of the gradient. After a failed backward, units that
// were not updated lose their gradients.
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
