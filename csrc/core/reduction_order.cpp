#include "core/reduction_order.h"

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

// See Note [reentrant checkpointing].
bool awaits_recomputation(const Unit& unit) {
  return unit.recomputations < unit.calls_to_recompute;
}

}  // namespace

void ReductionOrder::gradient_arrived(Unit& unit, std::size_t trainable) {
  if (unit.arrived.at(trainable) != 0) {
    return;  // autograd has added more to the same gradient
  }
  unit.arrived[trainable] = 1;
  unit.arrived_count += 1;
  arrived_units_ += unit.arrived_count == 1 ? 1 : 0;
  if (unit.arrived_count == unit.arrived.size() && !awaits_recomputation(unit) &&
      !awaits_inner_units(unit)) {
    complete(unit);
  }
}

void ReductionOrder::leave(Unit& unit) {
  unit.passes += 1;
  const bool has_passed = unit.passes >= unit.calls + unit.calls_to_recompute;
  if (unit.needs_reduction() && has_passed && !awaits_recomputation(unit)) {
    complete(unit);
  }
}

void ReductionOrder::end_backward() {
  reduce_latest_first([](const Unit& unit) {
    return unit.needs_reduction() || (unit.bucket->has_accumulated && unit.requires_gradient_sync);
  });
}

// Reduces the bucket once all of its units that ran are complete. Units without trainable
// parameters do not count. A unit that takes no part in the loss delays its bucket to end_backward.
void ReductionOrder::complete(Unit& unit) {
  unit.is_complete = true;
  for (const Unit* other : unit.bucket->units) {
    if ((other->ran || other->calls_to_recompute > 0) && !other->is_complete &&
        !other->arrived.empty()) {
      return;
    }
  }
  reduce_units_entered_after(unit);
  reduce(*unit.bucket);
}

void ReductionOrder::reduce(Bucket& bucket) {
  for (const Unit* unit : bucket.units) {
    arrived_units_ -= unit->arrived_count > 0 ? 1 : 0;
  }
  reducer_.pack_and_reduce(bucket);
}

// See Note [order of reductions].
void ReductionOrder::reduce_units_entered_after(const Unit& unit) {
  std::size_t here = 0;
  for (const Unit* other : unit.bucket->units) {
    here += other->arrived_count > 0 ? 1 : 0;
  }
  if (arrived_units_ == here && !may_reduce_unused_) {
    return;
  }
  reduce_latest_first([&unit](const Unit& other) {
    return other.needs_reduction() && other.entered > unit.entered && other.bucket != unit.bucket &&
           !awaits_recomputation(other);
  });
}

// Reduces the buckets of the chosen units. The last one that forward entered comes first.
template <typename IsChosen>
void ReductionOrder::reduce_latest_first(const IsChosen& is_chosen) {
  chosen_.clear();
  for (const auto& unit : units_) {
    if (is_chosen(*unit)) {
      chosen_.push_back(unit.get());
    }
  }
  std::sort(chosen_.begin(), chosen_.end(), [](const Unit* a, const Unit* b) {
    return std::pair(a->entered, a->number) > std::pair(b->entered, b->number);
  });
  for (const Unit* unit : chosen_) {
    if (is_chosen(*unit)) {  // not reduced with another unit of its bucket
      reduce(*unit->bucket);
    }
  }
}

// See Note [order of reductions].
bool ReductionOrder::awaits_inner_units(const Unit& unit) const {
  return unit.encloses_units && std::any_of(units_.begin(), units_.end(), [&](const auto& other) {
           return encloses(unit, *other) && other->ran && !other->is_reduced &&
                  !other->arrived.empty() && other->requires_gradient_sync &&
                  other->bucket != unit.bucket;
         });
}

bool ReductionOrder::encloses(const Unit& unit, const Unit& other) const {
  int parent = other.parent;
  while (parent >= 0 && parent != unit.number) {
    parent = units_[static_cast<std::size_t>(parent)]->parent;
  }
  return parent == unit.number;
}

}  // namespace fsdp
