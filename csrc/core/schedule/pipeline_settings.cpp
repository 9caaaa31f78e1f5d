// The pipeline's units and their settings, which are effective from the next use on.
#include <memory>
#include <utility>

#include "base/check.h"
#include "core/schedule/pipeline.h"

namespace fsdp {

int Pipeline::add_unit(UnitConfig config, UnitPort& port) {
  const auto number = static_cast<int>(units_.size());
  const int world_size = lanes_.of_mesh(config.mesh).gather.communicator().size();
  FSDP_CHECK(config.layout.world_size() == world_size, "Unit '", config.name, "' has a layout for ",
             config.layout.world_size(), " ranks. It needs one for ", world_size, ".");
  FSDP_CHECK(config.parent < number, "Unit '", config.name,
             "' was added before the unit that encloses it. Add the enclosing unit first.");
  units_.push_back(std::make_unique<Unit>(number, std::move(config), port));
  expect_unused(*units_.back());
  bucket_set_.invalidate_partition();
  bucket_set_.invalidate_memory();
  return number;
}

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

void Pipeline::form_buckets() try {
  if (!units_.empty() && units_.front()->bucket == nullptr) {
    bucket_set_.form(forward_order_, gatherer_, reducer_);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::update_buckets() try {
  bucket_set_.update(forward_order_, gatherer_, reducer_, exchange_);
} catch (const Error& error) {
  fail(error);
}

}  // namespace fsdp
