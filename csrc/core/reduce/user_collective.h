// User code that runs on a unit's reduced gradients before they are scaled and cast, or in place of
// the reduction.
//
// Note [reduce hooks]
// A hook sees the whole unit at once, behind the reduce-scatter and the all-reduce over replicas.
// So buckets that are formed later contain this unit alone; in earlier buckets it is a set of its
// own (Note [units that differ] in core/reduce/reducer.h). Pieces are finished when all of them
// have arrived. A hook may call collectives of its own, so it runs in the order of the lane, on the
// thread of the lane's stream if that has one.
//
// Note [communication hooks]
// A communication hook of FSDP1 replaces the reduction. It gets the packed gradients of all ranks'
// rows, and writes this rank's rows averaged over all ranks. If nothing is sharded, it averages the
// gradients in place. Gradients are then not scaled. The hook is set before the first forward, and
// the unit shares no bucket and is reduced in one piece.
//
// Note [custom collectives]
// FSDP2's custom collective sends each message of the unit, in the order of the lane and on its
// stream. Copies, casts, scales and comparisons of ranks stay as they are. A custom all-gather with
// smaller groups (Note [group shards]) is refused. Errors of a reduce-scatter are raised at the end
// of backward, and those of an all-gather where the unit waits for it.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "device/stream.h"

namespace fsdp {

// The memory that a hook may use. `output` has the gradients, or receives the result of a custom
// collective. `input` is set for a custom collective, and for a communication hook of ranks that
// share parameters. Otherwise it is null.
struct HookTensors {
  void* output;
  std::size_t numel;
  DType dtype;
  void* input = nullptr;
  std::size_t input_numel = 0;
};

class UserCollective {
 public:
  virtual ~UserCollective() = default;

  // Issues the hook to `stream`.
  virtual void issue(Stream& stream, const HookTensors& tensors) = 0;
  // Throws the first error of the hook since the last call. The caller has waited for the stream,
  // which goes on after such an error, so that other ranks do not wait for this one.
  virtual void check() = 0;
  // Drops such an error, after a backward that failed for another reason. Here, too, the caller has
  // waited for the stream.
  virtual void reset() = 0;
};

}  // namespace fsdp
