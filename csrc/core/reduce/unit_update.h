// Steps of an attached optimizer, which update a unit's shard in backward.
//
// Note [updates in backward]
// An attached optimizer (fsdp_ext/optim/attached.py) updates a unit's shard while backward computes
// the rest. The update finds gradients in .grad of the sharded parameters, and removes those that
// it has used. On a GPU it is issued to the stream of the reduction, and the bucket's `reduced`
// event is recorded behind it. A wait for the reduction therefore includes the update. On the host,
// the update runs on backward's thread: on a lane's thread, Python might free a model, and freeing
// it waits for that thread. Before a bucket is reduced, the update of the last bucket but one is
// finished: the host runs it, and a GPU waits for it and lends the gradients' memory (Note [lent
// gradients] in core/reduce/reducer.h). So two buckets have gradients at a time. A unit whose
// gradients this rank did not all use is updated at the end of backward, because other ranks may
// have used them (Note [parameters that some ranks do not use] in core/agree/backward_exchange.h).
// Backward refuses a unit whose shard was updated since its forward: its gradient would belong to
// other weights. It also refuses more gradients of a unit behind its update, because each update
// would see only a part of the gradient. After a backward that failed, units that were not updated
// yet lose their gradients.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace fsdp {

class UnitUpdate {
 public:
  virtual ~UnitUpdate() = default;

  // Updates the parameters that have a gradient. `stream` is the GPU stream to issue the work to.
  // If it is null, the gradients are complete, and the work runs on the calling thread. May throw.
  virtual void run(Stream* stream) = 0;
};

struct UpdateState {
  std::uint64_t count = 0;       // updates so far
  std::uint64_t in_forward = 0;  // updates before the last forward
  bool is_awaited = false;       // the reduced gradients have not been used yet
};

}  // namespace fsdp
