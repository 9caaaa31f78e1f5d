// What a unit is made of, and its settings.
#pragma once

#include <cstddef>
#include <string>

#include "core/layout.h"

namespace fsdp {

struct UnitConfig {
  std::string name;
  UnitLayout layout;
  int parent = -1;  // the unit that encloses it, added before it; -1 for the root
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  double pack_scale = 1.0;            // of gradients, before the reduction
  double reduce_scale = 1.0;          // after it
  std::size_t bucket_bytes = 0;       // limit of a shared bucket (core/merging.h); 0: not shared
  std::size_t max_message_bytes = 0;  // limit of a message of its bucket; 0: none
  bool unshards_in_backward = true;
  bool reduces_alone = false;  // it has a hook: Note [reduce hooks] in core/reduce_hook.h
  int reshard_group = 0;       // ranks; 0: all. Note [group shards] in core/group_shard.h
  int mesh = 0;                // in Lanes::meshes, from 1; 0: the root's. Note [several meshes]
};

}  // namespace fsdp
