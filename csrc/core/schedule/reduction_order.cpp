#include "core/schedule/reduction_order.h"

#include <algorithm>

namespace fsdp {
namespace {

bool is_complete(const Bucket& bucket) {
  return std::all_of(bucket.units.begin(), bucket.units.end(), [](const Unit* unit) {
    return unit->gradients.count() == 0 || unit->backward.is_complete();
  });
}

bool needs_reduction(const Bucket& bucket) {
  return std::any_of(bucket.units.begin(), bucket.units.end(), [](const Unit* unit) {
    return unit->gradients.needs_reduction(unit->requires_gradient_sync);
  });
}

}  // namespace

void ReductionOrder::begin_backward(const std::vector<BackwardStep>& steps) {
  awaited_.clear();
  for (const auto& unit : units_) {
    unit->backward.begin();
    unit->gradients.begin_backward();
    unit->bucket->is_awaited = false;
  }
  for (const BackwardStep& step : steps) {
    Unit& unit = *units_[static_cast<std::size_t>(step.unit)];
    unit.backward.add(step.action);
    if (!unit.bucket->is_awaited) {
      unit.bucket->is_awaited = true;
      awaited_.push_back(unit.bucket);
    }
  }
}

void ReductionOrder::advance() {
  while (!awaited_.empty() && is_complete(*awaited_.back())) {
    Bucket& bucket = *awaited_.back();
    awaited_.pop_back();
    if (needs_reduction(bucket)) {
      reducer_.pack_and_reduce(bucket);
    }
  }
}

// Only gradients that arrived late, and those of units without steps, are left. The last unit of
// the model comes first.
void ReductionOrder::end_backward() {
  advance();
  awaited_.clear();
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->gradients.has_left_over((*unit)->requires_gradient_sync)) {
      reducer_.pack_and_reduce(*(*unit)->bucket);
    }
  }
}

}  // namespace fsdp
