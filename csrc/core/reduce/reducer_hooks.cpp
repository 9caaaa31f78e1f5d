// How a reduction calls a unit's hook: Note [reduce hooks] in core/reduce/user_collective.h.
#include "core/reduce/reducer.h"
#include "core/reduce/user_collective.h"

namespace fsdp {
// `reduced` is this rank's segment of the whole bucket.
void Reducer::apply_hook(const Reduction& reduction, void* reduced) {
  Bucket& bucket = reduction.bucket;
  const Unit& unit = *reduction.units.front();
  const DType dtype = bucket.layout.reduce_dtype();
  streams_.order_after(reduction.after, streams_.messages(), bucket.reduction.label);
  unit.reduce_hook->issue(reduction.after,
                          {static_cast<char*>(reduced) + unit.gradient_offset * itemsize(dtype),
                           static_cast<std::size_t>(unit.layout.grad_numel()), dtype});
  if (reduced != bucket.flat_gradient()) {
    for (std::size_t i = 0; i < bucket.reduction.pieces_.size(); ++i) {
      finish(reduction, i, place_in(reduced, bucket, i));
    }
  }
}

// Has a hook send the message in place of the transport, if the unit has one: Note [communication
// hooks], and for a reduce-scatter, which has an input, Note [custom collectives].
bool Reducer::send_by_hook(const Reduction& reduction, Stream& stream, void* input, void* output,
                           std::size_t numel) {
  const Unit& unit = *reduction.units.front();
  const bool scatters = input != nullptr && unit.communication_hook == nullptr;
  UserCollective* const hook = scatters ? unit.scatter_hook.get() : unit.communication_hook.get();
  if (hook == nullptr) {
    return false;
  }
  const UnitLayout& layout = reduction.bucket.layout;
  const std::size_t input_numel =
      input == nullptr ? 0 : numel * static_cast<std::size_t>(layout.world_size());
  hook->issue(stream, {output, numel, layout.reduce_dtype(), input, input_numel});
  return true;
}

}  // namespace fsdp
