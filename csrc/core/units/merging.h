// Which units share a bucket. Pure arithmetic on the units' settings and on the order in which
// forward entered and left them. All ranks compute the same result.
//
// Note [neighbours]
// Units share a bucket only if forward runs no other unit between them. The bucket then lives from
// the start of its first unit to the end of its last one, in backward the other way around, and no
// more buckets are alive at a time than units were. So a bucket is a contiguous part of the
// sequence of enters and leaves that has both events of each of its units and no other: a row of
// siblings, each with all units nested in it. A unit that is entered twice shares its bucket with
// none.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "core/units/unit_config.h"

namespace fsdp {

// The properties that have to be equal for two units to share a bucket, and the unit's size.
struct MergeTraits : BucketSettings {
  std::size_t bytes = 0;  // that all ranks together gather
  std::size_t limit = 0;  // for the bytes of this unit's bucket; 0: the unit shares with none
  MessageLimits message_limits;
  bool trainable = true;  // otherwise the dtypes and scales of gradients do not matter
  DType grad_dtype = DType::Float32;
  DType reduce_dtype = DType::Float32;
  DType gradient_dtype = DType::Float32;  // of the unsharded parameters'
  bool is_offloaded = false;
  bool needs_cast = false;  // does not matter if there are no bytes
  int mesh = 0;
};

// A single rank sends nothing, so its units do not share buckets.
MergeTraits merge_traits(const UnitConfig& unit);

struct ForwardEvent {
  int unit;
  bool enters;  // otherwise forward leaves the unit

  bool operator==(const ForwardEvent& other) const {
    return unit == other.unit && enters == other.enters;
  }
};

// The order in which modules are nested. Each unit is entered once, before the units inside it.
// `parents` has, for each unit, the number of the unit that encloses it (lower than its own), or
// -1.
std::vector<ForwardEvent> events_of_registration(const std::vector<int>& parents);

// Whether forward entered the units in order of registration, each once.
bool are_in_order_of_registration(const std::vector<ForwardEvent>& events);

// The buckets in order of their first units, each with its units in the order of `events`. Units
// without events are alone.
using Partition = std::vector<std::vector<int>>;
Partition merge_units(const std::vector<MergeTraits>& units,
                      const std::vector<ForwardEvent>& events);

}  // namespace fsdp
