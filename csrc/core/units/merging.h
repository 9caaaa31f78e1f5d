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

#include "core/units/unit_config.h"

namespace fsdp {

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
std::vector<int> parents_of(const std::vector<const UnitConfig*>& units);

// Whether forward entered the units in order of registration, each once.
bool are_in_order_of_registration(const std::vector<ForwardEvent>& events);

// Two units share a bucket only if they are on one mesh, are resharded alike, have the same limits
// of messages and are both offloaded or not. They also have to be cast alike for gathers, unless
// one sends nothing, and to have gradients of the same dtypes and scales, unless one trains
// nothing.
//
// The buckets in order of their first units, each with its units in the order of `events`. Units
// without events are alone.
using Partition = std::vector<std::vector<int>>;
Partition merge_units(const std::vector<const UnitConfig*>& units,
                      const std::vector<ForwardEvent>& events);

}  // namespace fsdp
