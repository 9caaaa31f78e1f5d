// A unit's parts, and its settings.
//
// The settings may change between passes: UnitSet::apply. A new setting needs a field here, a line
// in bindings/layout.cpp and _C.pyi, and its value in fsdp_ext/sharding/root/root.py, or in
// unit_tree.py if the planner needs it. If buckets, their memory or collectives depend on the
// setting, UnitSet::apply has to invalidate them.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/layout.h"
#include "core/memory/memory_plan.h"
#include "core/reduce/unit_update.h"
#include "core/reduce/user_collective.h"

namespace fsdp {

// core/units/merging.cpp compares the settings that are the same for all units of a bucket.
struct BucketSettings {
  bool reshard_after_forward = true;
  int reshard_group = 0;  // ranks; 0: all. Note [group shards] in core/gather/bucket_gather.h
  bool reshard_after_backward = true;
  // With false, the user promises that backward does not read the unit's parameters, as backward of
  // an embedding does not. Gradients arrive nevertheless.
  bool unshards_in_backward = true;
  double pre_scale = 1.0;   // of gradients, before the reduction
  double post_scale = 1.0;  // after it

  bool reshard_alike(const BucketSettings& other) const {
    return reshard_after_forward == other.reshard_after_forward &&
           reshard_group == other.reshard_group &&
           reshard_after_backward == other.reshard_after_backward &&
           unshards_in_backward == other.unshards_in_backward;
  }
  bool scale_alike(const BucketSettings& other) const {
    return pre_scale == other.pre_scale && post_scale == other.post_scale;
  }
};

struct UnitSettings : BucketSettings {
  bool keeps_slot_after_evaluation =
      false;  // Note [after an evaluation] in core/gather/unit_gather.h
  bool requires_gradient_sync = true;
  bool reduces_unused = false;   // parameters that no rank uses get zeros in each reduction
  std::size_t bucket_bytes = 0;  // limit of a shared bucket (core/units/merging.h); 0: not shared
  bool is_unmergeable = false;   // it has a hook, of any kind
  bool reads_whole_output = false;  // it has a reduce_hook
  // While a unit is summoned, its modules have parameters that the pipeline does not know. Forward
  // neither gathers nor attaches it, and no backward may come for it. The unit is resharded before.
  bool is_summoned = false;
  std::vector<int> forward_prefetch;   // empty: the recorded order
  std::vector<int> backward_prefetch;  // empty: the reverse of forward
  // Null for none: core/reduce/user_collective.h. A communication hook is set before the first
  // forward.
  std::shared_ptr<UserCollective> reduce_hook;         // Note [reduce hooks]
  std::shared_ptr<UserCollective> communication_hook;  // Note [communication hooks]
  std::shared_ptr<UserCollective> gather_hook;         // Note [custom collectives]
  std::shared_ptr<UserCollective> scatter_hook;
  std::shared_ptr<UnitUpdate> update;  // Note [updates in backward]
};

struct UnitConfig : UnitSettings {
  UnitConfig(std::string unit_name, UnitLayout unit_layout, UnitSettings settings = {})
      : UnitSettings(std::move(settings)),
        name(std::move(unit_name)),
        layout(std::move(unit_layout)) {}

  std::string name;
  UnitLayout layout;
  int parent = -1;               // the unit that encloses it, added before it; -1 for the root
  MessageLimits message_limits;  // of its bucket
  int mesh = 0;                  // in Lanes::meshes, from 1; 0: the root's. Note [several meshes]
};

}  // namespace fsdp
