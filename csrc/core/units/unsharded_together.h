// Which buckets are unsharded at once, if each pass runs the units in a known order and prefetches
// the next buckets. Pure arithmetic.
#pragma once

#include <cstddef>
#include <vector>

#include "core/memory/ring_plan.h"
#include "core/units/merging.h"

namespace fsdp {

// `has_slot`: by bucket, whether its slot is in the ring. `depth` is the number of buckets that are
// gathered ahead. Backward runs `events` in reverse. Each unit has events.
BucketSets unsharded_together(const Partition& partition, const std::vector<ForwardEvent>& events,
                              const std::vector<char>& has_slot, std::size_t depth);

}  // namespace fsdp
