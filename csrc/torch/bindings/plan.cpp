#include "torch/bindings/plan.h"

#include <string>
#include <vector>

#include "base/check.h"
#include "core/layout.h"
#include "core/memory_plan.h"
#include "core/merging.h"
#include "core/unit.h"

namespace py = pybind11;

namespace fsdp {
namespace {

GatherBy gather_by_named(const std::string& name) {
  FSDP_CHECK(name == "packing" || name == "size" || name == "parameter",
             "expects gathers by 'packing', 'size' or 'parameter' but got '", name, "'");
  return name == "packing" ? GatherBy::Packing
         : name == "size"  ? GatherBy::Size
                           : GatherBy::Parameter;
}

std::size_t gradient_bytes(const UnitLayout& layout) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < layout.params().size(); ++i) {
    if (layout.params()[i].trainable) {
      bytes += static_cast<std::size_t>(layout.placements()[i].numel) *
               itemsize(layout.params()[i].param_dtype);
    }
  }
  return bytes;
}

struct PlannedBucket {
  std::vector<int> units;
  UnitLayout layout;
  BucketUse use;
  bool reduces_in_place = true;
  const char* gather_plan = "";
};

PlannedBucket plan_bucket(const std::vector<UnitConfig>& units, const std::vector<int>& numbers,
                          const std::vector<MergeTraits>& traits, GatherBy by) {
  std::vector<const UnitLayout*> layouts;
  for (const int number : numbers) {
    layouts.push_back(&units[static_cast<std::size_t>(number)].layout);
  }
  const MergeTraits& first = traits[static_cast<std::size_t>(numbers.front())];
  UnitLayout layout = UnitLayout::joined(layouts);
  const BucketUse use{buffers_of(layout, by, first.max_message_bytes), first.reshard_after_forward};
  const bool in_place = reduces_in_place(layout, first.reduce_scale);
  const char* name =
      layout.gather_plan(by, gather_parts(layout, first.max_message_bytes).front()).name();
  return {numbers, std::move(layout), use, in_place, name};
}

py::dict describe(const PlannedBucket& bucket) {
  const auto ranks = static_cast<std::size_t>(bucket.layout.world_size());
  const BucketBuffers& buffers = bucket.use.buffers;
  py::dict result;
  result["units"] = bucket.units;
  result["gather_bytes"] = bucket.layout.gather_bytes() * ranks;
  result["reduce_bytes"] = buffers.reduce_output * ranks;
  result["unsharded_bytes"] = bucket.layout.unsharded_bytes();
  result["gather_plan"] = bucket.gather_plan;
  result["gather_messages"] = buffers.gather_messages;
  result["reduce_messages"] = buffers.reduce_messages;
  result["gather_input_bytes"] = buffers.gather_input;
  result["slot_bytes"] = buffers.slot;
  result["reshards_after_forward"] = bucket.use.reshards_after_forward;
  return result;
}

// Buckets in order of registration, and what they take on each rank.
py::dict plan_memory(const std::vector<UnitConfig>& units, const std::string& gather_by,
                     int nesting, std::size_t prefetch_depth) {
  const GatherBy by = gather_by_named(gather_by);
  std::vector<MergeTraits> traits;
  std::vector<int> parents;
  for (const UnitConfig& unit : units) {
    traits.push_back(merge_traits(unit));
    parents.push_back(unit.parent);
  }
  std::vector<PlannedBucket> buckets;
  std::vector<int> bucket_of(units.size(), -1);
  for (const std::vector<int>& numbers : merge_units(traits, events_of_registration(parents))) {
    for (const int number : numbers) {
      bucket_of[static_cast<std::size_t>(number)] = static_cast<int>(buckets.size());
    }
    buckets.push_back(plan_bucket(units, numbers, traits, by));
  }
  std::vector<BucketUse> uses;
  std::vector<std::size_t> gradients;
  std::vector<int> enclosing;
  py::list described;
  std::size_t kept = 0;
  std::size_t gather_inputs = 0;
  bool in_place = true;
  for (const PlannedBucket& bucket : buckets) {
    uses.push_back(bucket.use);
    gradients.push_back(gradient_bytes(bucket.layout));
    const int parent = parents[static_cast<std::size_t>(bucket.units.front())];
    enclosing.push_back(parent < 0 ? -1 : bucket_of[static_cast<std::size_t>(parent)]);
    described.append(describe(bucket));
    kept += bucket.use.reshards_after_forward ? 0 : bucket.use.buffers.slot;
    gather_inputs += bucket.use.buffers.gather_input;
    in_place = in_place && (bucket.reduces_in_place || bucket.layout.world_size() == 1 ||
                            bucket.layout.trainable_count() == 0);
  }
  const GatherMemory gathers =
      plan_gathers(uses, ring_slots(nesting, prefetch_depth, traits.front().reshard_after_forward));
  const ReduceMemory reductions = plan_reductions(uses);
  py::dict result;
  result["buckets"] = described;
  result["ring_slots"] = gathers.slots;
  result["ring_slot_bytes"] = gathers.slot_bytes;
  result["staging_bytes"] = gathers.staging_bytes;
  result["reduce_input_bytes"] = reductions.input_bytes;
  result["reduce_output_bytes"] = in_place ? 0 : reductions.output_bytes;
  result["kept_bytes"] = kept;
  result["gather_input_bytes"] = gather_inputs;
  result["gradients_in_flight_bytes"] = gradients_in_flight(gradients, enclosing);
  return result;
}

}  // namespace

void register_plan(py::module_& m) {
  m.def("plan_memory", &plan_memory, py::arg("units"), py::kw_only(), py::arg("gather_by"),
        py::arg("nesting"), py::arg("prefetch_depth"));
}

}  // namespace fsdp
