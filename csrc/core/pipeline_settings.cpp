// The pipeline's settings, which are effective from the next use on, and what is asked between
// steps.
#include <algorithm>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "core/pipeline.h"

namespace fsdp {

namespace {

// Whether units with these settings may have other buckets.
bool changes_buckets(const UnitSettings& from, const UnitSettings& to) {
  const auto of_buckets = [](const UnitSettings& settings) {
    return std::tie(settings.reshard_after_forward, settings.reshard_group,
                    settings.reshard_after_backward, settings.unshards_in_backward,
                    settings.pack_scale, settings.reduce_scale, settings.bucket_bytes,
                    settings.reduces_alone);
  };
  return of_buckets(from) != of_buckets(to);
}

// Whether the collectives of units with these settings may differ from those that ranks compared.
bool changes_collectives(const UnitSettings& from, const UnitSettings& to) {
  return from.bucket_bytes != to.bucket_bytes || from.reduces_alone != to.reduces_alone;
}

bool changes_memory(const UnitSettings& from, const UnitSettings& to) {
  const auto of_memory = [](const UnitSettings& settings) {
    return std::tie(settings.reshard_after_forward, settings.reshard_group,
                    settings.forward_prefetch, settings.backward_prefetch);
  };
  return of_memory(from) != of_memory(to);
}

}  // namespace

void Pipeline::apply(int number, UnitSettings settings) {
  Unit& unit = unit_at(number);
  FSDP_CHECK(settings.reduces_alone || !settings.has_hook(), "Unit '", unit.name,
             "' has a hook, so it needs reduces_alone.");
  if (changes_buckets(unit, settings)) {
    bucket_set_.invalidate_partition();
  }
  if (changes_collectives(unit, settings)) {
    bucket_set_.invalidate_comparison();
  }
  if (changes_memory(unit, settings)) {
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
    moments += kOfAPiece * (bucket->gathers.size() + bucket->reductions.size());
    moments += bucket->group != nullptr ? kOfAPiece * bucket->group->gathers.size() : 0;
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
  bucket_set_.update(forward_order_, gatherer_, reducer_);
} catch (const Error& error) {
  fail(error);
}

std::vector<AccumulatedGradients::Part> Pipeline::accumulated_parts(int number) {
  const Bucket* bucket = unit(number).bucket;
  if (bucket == nullptr || !bucket->accumulated.any()) {
    return {};
  }
  bucket->packed->synchronize(device_.timeout(), bucket->reduce_label);
  lanes_.reduce.synchronize();
  return bucket->accumulated.parts(unit(number));
}

std::vector<char> Pipeline::has_accumulated(int number) const {
  const Unit& asked = unit(number);
  std::vector<char> has(asked.arrived.size(), 0);
  for (std::size_t i = 0; asked.bucket != nullptr && i < has.size(); ++i) {
    has[i] = asked.bucket->accumulated.has(asked, i) ? 1 : 0;
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
