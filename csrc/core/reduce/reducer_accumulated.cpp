// Gradients that backwards without gradient sync have accumulated, between passes.
#include <algorithm>

#include "base/check.h"
#include "core/reduce/reducer.h"

namespace fsdp {

std::vector<AccumulatedGradients::Part> Reducer::accumulated_parts(const Unit& unit) {
  if (unit.bucket == nullptr || !unit.bucket->reduction.accumulated_.any()) {
    return {};
  }
  const BucketReduction& reduction = unit.bucket->reduction;
  reduction.packed_->synchronize(device_.timeout(), reduction.label);
  lane_.synchronize();
  return reduction.accumulated_.parts(unit);
}

std::vector<char> Reducer::has_accumulated(const Unit& unit) {
  std::vector<char> has(unit.gradients.count(), 0);
  for (std::size_t i = 0; unit.bucket != nullptr && i < has.size(); ++i) {
    has[i] = unit.bucket->reduction.accumulated_.has(unit, i) ? 1 : 0;
  }
  return has;
}

bool Reducer::has_any_accumulated(const Unit& unit) {
  const std::vector<char> has = has_accumulated(unit);
  return std::find(has.begin(), has.end(), 1) != has.end();
}

void Reducer::set_accumulated(Unit& unit, const std::vector<char>& has) {
  FSDP_CHECK(unit.bucket != nullptr && has.size() == unit.gradients.count(), "set_accumulated got ",
             has.size(), " flags. Unit '", unit.name, "' needs ", unit.gradients.count(),
             ", and a bucket.");
  unit.gradients.awaits_reduction_ = true;
  if (std::find(has.begin(), has.end(), 1) == has.end()) {
    return;
  }
  AccumulatedGradients& accumulated = unit.bucket->reduction.accumulated_;
  if (!accumulated.any()) {
    packings_ += 1;
    accumulated.begin(device_);
  }
  for (std::size_t i = 0; i < has.size(); ++i) {
    if (has[i] != 0) {
      accumulated.add(unit, i, packings_);
    }
  }
}

bool Reducer::has_accumulated_before(const std::vector<std::unique_ptr<Bucket>>& buckets) const {
  return std::any_of(buckets.begin(), buckets.end(), [this](const auto& bucket) {
    return bucket->reduction.accumulated_.any_before(first_packing_);
  });
}

}  // namespace fsdp
