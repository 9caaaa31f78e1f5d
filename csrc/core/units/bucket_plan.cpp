#include "core/units/bucket_plan.h"

#include <set>
#include <utility>

#include "base/check.h"
#include "comm/messages/message_staging.h"
#include "core/units/merging.h"
#include "core/units/unsharded_together.h"

namespace fsdp {
namespace {

PlannedBucket plan_bucket(const std::vector<UnitConfig>& units, const std::vector<int>& numbers,
                          const BucketPlanOptions& options) {
  const GatherBy by = options.transport.gather_by;
  std::vector<const UnitLayout*> layouts;
  layouts.reserve(numbers.size());
  for (const int number : numbers) {
    layouts.push_back(&units[static_cast<std::size_t>(number)].layout);
  }
  const UnitConfig& first = units[static_cast<std::size_t>(numbers.front())];
  UnitLayout layout = UnitLayout::joined(layouts);
  const BucketUse use{
      buffers_of(layout, by, first.message_limits, SmallerGroup{first.reshard_group, by}),
      first.reshard_after_forward, first.reads_whole_output};
  const char* gather_plan =
      layout.gather_plan(by, gather_parts(layout, first.message_limits).front()).name();
  const bool is_summed = layout.world_size() > 1 || options.replicas > 1;
  const bool needs_reduce_output =
      is_summed && layout.trainable_count() > 0 && !reduces_in_place(layout, first.post_scale);
  return {numbers, std::move(layout), use, gather_plan, needs_reduce_output, first.reshard_group};
}

// Each size of smaller groups has lanes of its own: Note [group shards].
std::size_t message_staging_of_groups(const std::vector<UnitConfig>& units,
                                      const TransportTraits& transport) {
  std::set<int> sizes;
  for (const UnitConfig& unit : units) {
    sizes.insert(unit.reshard_group);
  }
  std::size_t bytes = 0;
  for (const int ranks : sizes) {
    bytes += ranks > 0 ? message_staging_bytes(transport, ranks) : 0;
  }
  return bytes;
}

}  // namespace

BucketPlan plan_buckets(const std::vector<UnitConfig>& units, const BucketPlanOptions& options) {
  FSDP_CHECK(!units.empty(), "A plan got no units. Pass at least the root's.");
  std::vector<const UnitConfig*> configs;
  configs.reserve(units.size());
  for (const UnitConfig& unit : units) {
    configs.push_back(&unit);
  }
  const std::vector<int> parents = parents_of(configs);
  BucketPlan plan;
  for (const std::vector<int>& numbers : merge_units(configs, events_of_registration(parents))) {
    plan.buckets.push_back(plan_bucket(units, numbers, options));
  }
  std::vector<BucketUse> uses;
  Partition partition;
  const bool has_peers = units.front().layout.world_size() > 1;
  const bool has_replicas = options.replicas > 1;
  bool needs_reduce_output = (has_peers || has_replicas) && options.transport.keeps_reduce_output;
  for (const PlannedBucket& bucket : plan.buckets) {
    uses.push_back(bucket.use);
    partition.push_back(bucket.units);
    plan.kept_bytes += bucket.use.reshards_after_forward ? 0 : bucket.use.buffers.slot;
    plan.group_shard_bytes += bucket.use.buffers.group_shard;
    needs_reduce_output = needs_reduce_output || bucket.needs_reduce_output;
  }
  const UnitConfig& root = units.front();
  const int slots =
      ring_slots(options.nesting, options.prefetch_depth, root.reshard_after_forward, root.layout);
  plan.gathers =
      plan_gathers(uses, slots,
                   options.has_prefetch_lists
                       ? BucketSets{}
                       : unsharded_together(partition, parents, uses, options.prefetch_depth),
                   options.keeps_gather_inputs);
  plan.reductions = plan_reductions(uses, !options.on_host && has_peers, has_replicas);
  plan.reduce_output_bytes = needs_reduce_output ? plan.reductions.output_bytes : 0;
  plan.message_staging_bytes =
      message_staging_bytes(options.transport, units.front().layout.world_size()) +
      message_staging_of_groups(units, options.transport) +
      (has_replicas ? message_staging_bytes(options.replica_transport, options.replicas) : 0);
  return plan;
}

}  // namespace fsdp
