// The buckets of a model that does not run, and the memory that each rank needs for them. This is
// the arithmetic of core/units/merging.h and core/memory/memory_plan.h, for all units at once.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/transport_traits.h"
#include "core/memory/memory_plan.h"
#include "core/units/unit_config.h"

namespace fsdp {

struct PlannedBucket {
  std::vector<int> units;  // by number
  UnitLayout layout;
  BucketUse use;
  const char* gather_plan = "";
  bool needs_reduce_output = false;
  int reshard_group = 0;
};

struct BucketPlan {
  std::vector<PlannedBucket> buckets;
  GatherMemory gathers;
  ReduceMemory reductions;
  std::size_t reduce_output_bytes = 0;  // 0 if all reductions write flat gradients
  std::size_t kept_bytes = 0;           // of buckets that stay unsharded after forward
  std::size_t group_shard_bytes = 0;    // Note [group shards]
  std::size_t message_staging_bytes = 0;
};

struct BucketPlanOptions {
  TransportTraits transport;
  int nesting = 1;                  // units below the root that enclose each other, at most
  std::size_t prefetch_depth = 1;   // buckets
  bool has_prefetch_lists = false;  // the user says which units are gathered ahead
  bool on_host = true;              // as Device::is_host
  bool keeps_gather_inputs = true;
  // - The ranks with the same shard: Note [replicas] in core/reduce/reducer.h
  int replicas = 1;
  TransportTraits replica_transport;
};

// `units` are in order of registration, and so are the buckets.
BucketPlan plan_buckets(const std::vector<UnitConfig>& units, const BucketPlanOptions& options);

}  // namespace fsdp
