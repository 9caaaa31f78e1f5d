// The pipeline's settings, which are effective from the next use on.
#include <utility>

#include "base/check.h"
#include "core/schedule/pipeline.h"

namespace fsdp {

void Pipeline::apply(int number, UnitSettings settings) {
  Unit& unit = this->unit(number);
  FSDP_CHECK(settings.is_unmergeable || !settings.has_hook(), "Unit '", unit.name,
             "' has a hook, so it needs is_unmergeable.");
  FSDP_CHECK(settings.reads_whole_output || settings.reduce_hook == nullptr, "Unit '", unit.name,
             "' has a reduce hook, so it needs reads_whole_output.");
  const bool limits_differ =
      unit.bucket_bytes != settings.bucket_bytes || unit.is_unmergeable != settings.is_unmergeable;
  if (limits_differ) {
    bucket_set_.invalidate_comparison();
  }
  if (limits_differ || !unit.reshard_alike(settings) || !unit.scale_alike(settings)) {
    bucket_set_.invalidate_partition();
  }
  const bool reads_differ = unit.reads_whole_output != settings.reads_whole_output;
  if ((reads_differ && unit.bucket != nullptr && unit.bucket->reduction.is_in_pieces()) ||
      unit.reshard_after_forward != settings.reshard_after_forward ||
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
  backward_order_.set_expected(unit.number, unit.reduces_unused && unit.gradients.count() > 0);
}

void Pipeline::form_buckets(bool plans_memory) try {
  if (plans_memory) {
    bucket_set_.update(forward_order_, gatherer_, reducer_, exchange_);
  } else if (!units_.empty() && units_.front()->bucket == nullptr) {
    bucket_set_.form(forward_order_, reducer_);
  }
} catch (const Error& error) {
  fail(error);
}

}  // namespace fsdp
