// The pipeline's settings, which are effective from the next use on, and what is asked between
// steps.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/schedule/pipeline.h"

namespace fsdp {

void Pipeline::apply(int number, UnitSettings settings) {
  Unit& unit = unit_at(number);
  FSDP_CHECK(settings.reduces_alone || !settings.has_hook(), "Unit '", unit.name,
             "' has a hook, so it needs reduces_alone.");
  const bool limits_differ =
      unit.bucket_bytes != settings.bucket_bytes || unit.reduces_alone != settings.reduces_alone;
  if (limits_differ) {
    bucket_set_.invalidate_comparison();
  }
  if (limits_differ || !unit.reshard_alike(settings) || !unit.scale_alike(settings)) {
    bucket_set_.invalidate_partition();
  }
  if (unit.reshard_after_forward != settings.reshard_after_forward ||
      unit.reshard_group != settings.reshard_group ||
      unit.forward_prefetch != settings.forward_prefetch ||
      unit.backward_prefetch != settings.backward_prefetch) {
    bucket_set_.invalidate_memory();
  }
  static_cast<UnitSettings&>(unit) = std::move(settings);
  expect_unused(unit);
}

// Backward takes steps of units that it may not reach, if unused parameters are reduced.
void Pipeline::expect_unused(const Unit& unit) {
  backward_order_.set_expected(unit.number, unit.reduces_unused && !unit.arrived.empty());
}

void Pipeline::set_prefetch_depth(int depth) {
  if (options_.prefetch_depth != depth) {
    options_.prefetch_depth = depth;
    bucket_set_.invalidate_memory();
  }
}

// - Measurements and buckets

// The number of moments is an estimate: each unit's forward, backward and waits, and each piece's
// copies and message.
void Pipeline::keep_times(std::size_t iterations, bool drained) {
  constexpr std::size_t kOfAUnit = 12;
  constexpr std::size_t kOfAPiece = 8;
  std::size_t moments = kOfAUnit * (units_.size() + 1);
  for (const auto& bucket : buckets()) {
    moments +=
        kOfAPiece * (bucket->gather.all_ranks().pieces.size() + bucket->reduction.pieces().size());
    const GroupShard* const group = bucket->gather.group();
    moments += group != nullptr ? kOfAPiece * group->source.pieces.size() : 0;
  }
  ledger_.keep_times(iterations, moments, drained);
}

void Pipeline::form_buckets() try {
  if (!units_.empty() && units_.front()->bucket == nullptr) {
    bucket_set_.form(forward_order_, reducer_);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::update_buckets() try {
  bucket_set_.update(forward_order_, gatherer_, reducer_, exchange_);
} catch (const Error& error) {
  fail(error);
}

std::vector<AccumulatedGradients::Part> Pipeline::accumulated_parts(int number) {
  const Unit& asked = unit(number);
  if (asked.bucket == nullptr || !asked.bucket->reduction.accumulated().any()) {
    return {};
  }
  const BucketReduction& reduction = asked.bucket->reduction;
  reduction.packed().synchronize(device_.timeout(), reduction.label);
  lanes_.reduce.synchronize();
  return reduction.accumulated().parts(asked);
}

std::vector<char> Pipeline::has_accumulated(int number) const {
  const Unit& asked = unit(number);
  std::vector<char> has(asked.arrived.size(), 0);
  for (std::size_t i = 0; asked.bucket != nullptr && i < has.size(); ++i) {
    has[i] = asked.bucket->reduction.accumulated().has(asked, i) ? 1 : 0;
  }
  return has;
}

void Pipeline::set_accumulated(int number, const std::vector<char>& has) {
  Unit& unit = unit_at(number);
  FSDP_CHECK(unit.bucket != nullptr && has.size() == unit.arrived.size(), "set_accumulated got ",
             has.size(), " flags. Unit '", unit.name, "' needs ", unit.arrived.size(),
             ", and a bucket.");
  unit.awaits_reduction = true;
  if (std::find(has.begin(), has.end(), 1) != has.end()) {
    reducer_.begin_accumulating(unit, has);
  }
}

const Bucket& Pipeline::bucket_of(int number) const {
  const Unit& asked = unit(number);
  FSDP_CHECK(asked.bucket != nullptr, "Unit '", asked.name,
             "' has no bucket yet. Call form_buckets() before.");
  return *asked.bucket;
}

}  // namespace fsdp
