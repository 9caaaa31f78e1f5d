// Gathers buckets ahead of the unit that runs, and reshards prefetched units that no pass used.
#pragma once

#include <cstddef>
#include <vector>

#include "core/gather/gatherer.h"
#include "core/schedule/forward_order.h"
#include "core/schedule/passes.h"
#include "core/schedule/pipeline_options.h"
#include "core/units/bucket.h"
#include "core/units/unit.h"
#include "core/units/unit_set.h"

namespace fsdp {

// `next_unit` returns the units that the pass comes to next, one after the other, and then
// ForwardOrder::kNoUnit.
class Prefetcher {
 public:
  // All of these outlive this. Options and passes may change.
  Prefetcher(const UnitSet& units, Gatherer& gatherer, const PipelineOptions& options,
             const Passes& passes)
      : units_(units), gatherer_(gatherer), options_(options), passes_(passes) {}

  // The user's targets, or else the next buckets.
  template <typename NextUnit>
  void prefetch(const Unit& unit, const std::vector<int>& targets, NextUnit next_unit) const {
    for (const int target : targets) {
      Unit& next = units_.at(target);
      if (!next.is_summoned && (!passes_.in_backward() || next.unshards_in_backward)) {
        gatherer_.unshard(next, /*on_demand=*/false);
      }
    }
    if (!targets.empty()) {
      return;
    }
    prefetch_buckets(unit.bucket, options_.prefetch_depth, next_unit);
  }

  // Up to `count` buckets behind `last`.
  template <typename NextUnit>
  void prefetch_buckets(const Bucket* last, int count, NextUnit next_unit) const {
    for (int issued = 0; issued < count;) {
      const int number = next_unit();
      if (number == ForwardOrder::kNoUnit) {
        return;
      }
      Unit& target = units_.at(number);
      if (target.bucket == last || target.is_summoned) {
        continue;
      }
      if (!gatherer_.unshard(target, /*on_demand=*/false)) {
        return;  // the next ones wait behind it, so that gathers keep their order
      }
      last = target.bucket;
      issued += 1;
    }
  }

  // A unit that this pass has left out would keep the bucket's slot. So the slot is released if
  // none of the bucket's units are still to come.
  void reshard_behind(Unit& unit) const {
    Bucket& bucket = *unit.bucket;
    if (bucket.gather.slot() == nullptr) {
      return;
    }
    const std::size_t first = passes_.in_backward() ? 0 : unit.position + 1;
    const std::size_t end = passes_.in_backward() ? unit.position : bucket.units.size();
    for (std::size_t i = first; i < end; ++i) {
      if (!bucket.units[i]->gather.is_sharded()) {
        return;
      }
    }
    gatherer_.reshard_speculative(bucket);
  }

 private:
  const UnitSet& units_;
  Gatherer& gatherer_;
  const PipelineOptions& options_;
  const Passes& passes_;
};

}  // namespace fsdp
