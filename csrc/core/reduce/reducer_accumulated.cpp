// Gradients that backwards without gradient sync accumulate.
#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "core/reduce/reducer.h"

namespace fsdp {

void Reducer::accumulate(Bucket& bucket, const Units& units) {
  const Range range(device_, bucket.ranges.accumulate);
  bucket.reduction.accumulated_.allocate(device_);
  streams_.follow_compute();
  Stream& before = begin_packing(bucket, /*into_accumulated=*/true);
  for (std::size_t i = 0; i < bucket.reduction.pieces_.size(); ++i) {
    pack(bucket, units, i, bucket.reduction.accumulated_.piece(i),
         bucket.reduction.accumulated_.any());
  }
  before.record(*bucket.reduction.packed_);
  bucket.reduction.accumulated_.add_arrived(units, packings_);
}

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

// Other units keep their accumulated gradients.
void Reducer::reset_accumulated(Bucket& bucket, const Units& units) {
  if (!bucket.reduction.accumulated_.any()) {
    return;
  }
  bucket.reduction.accumulated_.reset(device_, streams_.messages(), units);
  if (bucket.reduction.accumulated_.any() && (packs_ahead_ || streams_.is_any_in_pieces())) {
    input_.release_both(streams_.messages());
  }
}

// Copies one rank's accumulated gradients, because other units of the bucket may go on accumulating
// in `input`.
void Reducer::copy_to_output(const Reduction& reduction, const void* input) {
  const UnitLayout& layout = reduction.bucket.layout;
  void* const output = output_of(reduction, 0);  // one rank sends no pieces
  if (input == output) {
    return;
  }
  const Move move{input, output,
                  static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.reduce_dtype())};
  device_.transfer(streams_.messages(), std::chrono::nanoseconds(0), {move}, 0);
  ledger_.counters().copied_bytes += 2 * move.bytes;
}

}  // namespace fsdp
