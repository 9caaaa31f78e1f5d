// How a reduction calls a unit's hook: Note [reduce hooks] in core/reduce_hook.h.
#include "core/reduce_hook.h"
#include "core/reducer.h"

namespace fsdp {

// `reduced` is what the reductions have written, of all units of the bucket.
void Reducer::apply_hook(const Reduction& reduction, void* reduced) {
  Bucket& bucket = reduction.bucket;
  const Unit& unit = *reduction.units.front();
  const DType dtype = bucket.layout.reduce_dtype();
  streams_.order_after(reduction.after, streams_.messages(), bucket.reduce_label);
  unit.reduce_hook->issue(reduction.after,
                          static_cast<char*>(reduced) + unit.gradient_offset * itemsize(dtype),
                          static_cast<std::size_t>(unit.layout.grad_numel()), dtype);
  if (reduced != bucket.flat_gradient()) {
    for (std::size_t i = 0; i < bucket.reductions.size(); ++i) {
      finish(reduction, i, reduced);
    }
  }
}

void Reducer::check_hooks(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  for (const auto& bucket : buckets) {
    for (const Unit* unit : bucket->units) {
      if (unit->reduce_hook != nullptr) {
        unit->reduce_hook->check();
      }
    }
  }
}

}  // namespace fsdp
