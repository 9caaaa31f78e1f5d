// What a user does to a unit's reduced gradients, before they are scaled and cast.
//
// Note [reduce hooks]
// A hook sees the whole unit at once: behind the reduce-scatter and, if there are replicas, behind
// the all-reduce. So a unit with a hook is reduced by itself. Buckets that are formed from then on
// have it alone; in earlier ones it is a set of its own (Note [units that differ] in
// core/reducer.h). If it travels in pieces, they are finished when all of them have arrived.
// A hook may call collectives of its own, so it runs in the order of the lane, on the thread of
// the lane's stream if that has one.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "device/stream.h"

namespace fsdp {

class ReduceHook {
 public:
  virtual ~ReduceHook() = default;

  // Issues the hook to `stream`. It may write the gradients, `numel` elements of `dtype`.
  virtual void issue(Stream& stream, void* gradients, std::size_t numel, DType dtype) = 0;
  // Throws the first error of the hook since the last call. The caller has waited for the stream,
  // which goes on after such an error, so that other ranks do not wait for this one.
  virtual void check() = 0;
  // Forgets such an error, after a backward that failed for another reason. The same holds.
  virtual void forget() = 0;
};

}  // namespace fsdp
