// Which buckets are unsharded at once, if passes run the units in order of registration and
// prefetch the next buckets. Pure arithmetic.
#pragma once

#include <cstddef>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/memory/ring_plan.h"
#include "core/units/merging.h"

namespace fsdp {

// `parents`: see events_of_registration. `uses`: by bucket. `depth` is the number of buckets that
// are gathered ahead.
BucketSets unsharded_together(const Partition& partition, const std::vector<int>& parents,
                              const std::vector<BucketUse>& uses, std::size_t depth);

}  // namespace fsdp
