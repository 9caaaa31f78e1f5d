// Which units share a bucket. Pure arithmetic on what is known of the units and on the order in
// which forward entered and left them; all ranks come to the same.
//
// Note [neighbours]
// Units share a bucket only if forward runs them without any other unit between: their bucket then
// lives from the first one's beginning to the last one's end, and in backward the same the other
// way around, and no more buckets are alive at a time than units were. So a bucket is a part of
// the sequence of enters and leaves that has both of each of its units and nothing else: a row of
// siblings, each with all that is nested in it. A unit that is entered twice shares with none.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "core/unit_config.h"

namespace fsdp {

// What has to be equal for two units to share a bucket, and how much room they take there.
struct MergeTraits {
  std::size_t bytes = 0;  // of the gather, of all ranks together
  std::size_t limit = 0;  // of the bucket that this unit would be in; 0: it shares with none
  std::size_t max_message_bytes = 0;
  bool trainable = true;  // else its dtypes and scales of gradients do not matter
  DType grad_dtype = DType::Float32;
  DType reduce_dtype = DType::Float32;
  DType gradient_dtype = DType::Float32;  // of the unsharded parameters'
  bool needs_cast = false;                // does not matter where there are no bytes
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  double pack_scale = 1.0;
  double reduce_scale = 1.0;
};

// A single rank sends nothing, so its units do not share buckets.
MergeTraits merge_traits(const UnitConfig& unit);

struct ForwardEvent {
  int unit;
  bool enters;  // else leaves

  bool operator==(const ForwardEvent& other) const {
    return unit == other.unit && enters == other.enters;
  }
};

// The order that modules are nested in. Each unit is entered once, before those below it.
// `parents`, of the units by number: the unit that encloses it, or -1; lower than its own.
std::vector<ForwardEvent> events_of_registration(const std::vector<int>& parents);

// Buckets in order of their first units, each with its units in order of `events`. Units that
// `events` does not have are alone.
using Partition = std::vector<std::vector<int>>;
Partition merge_units(const std::vector<MergeTraits>& units,
                      const std::vector<ForwardEvent>& events);

}  // namespace fsdp
