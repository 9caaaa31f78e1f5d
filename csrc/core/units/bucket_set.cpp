#include "core/units/bucket_set.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "core/memory/memory_plan.h"
#include "core/units/unsharded_together.h"

namespace fsdp {

namespace {

// Forming buckets or planning memory would free buffers that a captured graph still uses.
void refuse_after_capture(const Gatherer& gatherer) {
  FSDP_CHECK(!gatherer.has_been_captured(),
             "A CUDA graph has captured a step of this model, and its replays use the buffers that "
             "this change would free. Change settings, and run a whole step, before the capture.");
}

}  // namespace

BucketSet::BucketSet(Lanes& lanes, const PipelineOptions& options,
                     const std::vector<std::unique_ptr<Unit>>& units, OrderCheck& order_check)
    : lanes_(lanes), options_(options), units_(units), order_check_(order_check) {}

void BucketSet::update(const ForwardOrder& order, Gatherer& gatherer, Reducer& reducer,
                       BackwardExchange& exchange) {
  if (!is_stale() || is_ring_in_use()) {
    return;
  }
  if (partition_is_stale_) {
    const Partition next = partition(order);
    compare_ranks(next, order);
    const bool differs = next != partition_ || has_other_groups();
    if (differs) {
      refuse_after_capture(gatherer);
    }
    const bool waits = differs && any_rank_has_accumulated(exchange);
    if (differs && !waits) {
      for (const auto& unit : units_) {
        gatherer.reshard(*unit);  // it stayed unsharded since an earlier forward
      }
      form(next, gatherer, reducer);
    }
    partition_is_stale_ = waits;
    note_order(order, gatherer);
  }
  if (!memory_is_planned()) {
    plan_memory(gatherer, reducer);
  }
}

// Places in the ring are for the order of registration. If any rank has run forward in another
// order, slots are equal on all ranks from then on, since ranks allocate the ring together.
void BucketSet::note_order(const ForwardOrder& order, const Gatherer& gatherer) {
  const bool is_other = order.is_recorded() && !are_in_order_of_registration(order.first_events());
  const bool any_is_other = lanes_.gather.most(is_other ? 1 : 0, order.is_recorded()) > 0;
  if (any_is_other != runs_in_other_order_) {
    refuse_after_capture(gatherer);
    runs_in_other_order_ = any_is_other;
    invalidate_memory();
  }
}

bool BucketSet::is_ring_in_use() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return unit->gather.slot() != nullptr &&
           unit->gather.slot() != unit->bucket->gather.persistent_slot();
  });
}

// Ranks that use different parameters have accumulated gradients of different ones.
bool BucketSet::any_rank_has_accumulated(BackwardExchange& exchange) const {
  if (buckets_.empty() || lanes_.device->is_capturing()) {
    return have_accumulated(buckets_);
  }
  static const std::string kWhat = "the exchange before buckets are formed";
  const std::vector<std::string> of_all =
      exchange.all_gather(kWhat, have_accumulated(buckets_) ? "1" : "0");
  return std::find(of_all.begin(), of_all.end(), "1") != of_all.end();
}

// A bucket has what it needs for its group from the start: Note [group shards].
bool BucketSet::has_other_groups() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) {
    const GroupShard* const group = bucket->gather.group();
    const int ranks = group != nullptr ? group->source.communicator.size() : 0;
    return ranks != bucket->units.front()->reshard_group;
  });
}

// See core/units/merging.h.
Partition BucketSet::partition(const ForwardOrder& order) const {
  std::vector<MergeTraits> traits;
  for (const auto& unit : units_) {
    traits.push_back(merge_traits(*unit));
  }
  return merge_units(
      traits, order.is_recorded() ? order.first_events() : events_of_registration(parents()));
}

std::vector<int> BucketSet::parents() const {
  std::vector<int> parents;
  for (const auto& unit : units_) {
    parents.push_back(unit->parent);
  }
  return parents;
}

void BucketSet::compare_ranks(const Partition& partition, const ForwardOrder& order) {
  const Compared target = order.is_recorded() ? Compared::Recorded : Compared::Registration;
  if (options_.check_order && compared_ < target) {
    order_check_.compare(partition, units_);
    compared_ = target;
  }
}

void BucketSet::form(const Partition& partition, Gatherer& gatherer, Reducer& reducer) {
  FSDP_CHECK(!lanes_.device->is_capturing(),
             "A CUDA graph capture cannot form buckets. Run a few whole steps before capturing "
             "one.");
  reducer.wait(buckets_);
  gatherer.synchronize();
  reducer.synchronize();
  for (const auto& unit : units_) {
    unit->bucket = nullptr;  // it would dangle if making a bucket throws
  }
  buckets_.clear();
  partition_.clear();
  invalidate_memory();
  for (const std::vector<int>& numbers : partition) {
    std::vector<Unit*> units;
    units.reserve(numbers.size());
    for (const int number : numbers) {
      units.push_back(units_.at(static_cast<std::size_t>(number)).get());
    }
    buckets_.push_back(
        std::make_unique<Bucket>(static_cast<int>(buckets_.size()), std::move(units), lanes_));
    buckets_.back()->place_units(lanes_);
  }
  partition_ = partition;
}

void BucketSet::plan_memory(Gatherer& gatherer, Reducer& reducer) {
  FSDP_CHECK(!lanes_.device->is_capturing(),
             "A CUDA graph capture cannot allocate buffers. Run a few whole steps before capturing "
             "one.");
  refuse_after_capture(gatherer);
  std::size_t depth = static_cast<std::size_t>(options_.prefetch_depth);
  bool has_prefetch_lists = false;
  for (const auto& unit : units_) {
    depth = std::max({depth, unit->forward_prefetch.size(), unit->backward_prefetch.size()});
    has_prefetch_lists =
        has_prefetch_lists || !unit->forward_prefetch.empty() || !unit->backward_prefetch.empty();
  }
  const Unit& root = *units_.front();
  gatherer.plan_memory(buckets_,
                       ring_slots(options_.nesting, depth, root.reshard_after_forward, root.layout),
                       has_prefetch_lists || runs_in_other_order_
                           ? BucketSets{}
                           : unsharded_together(partition_, parents(), uses_of(buckets_), depth),
                       options_.keeps_gather_inputs);
  reducer.plan_memory(buckets_);
  planned_depth_ = options_.prefetch_depth;
}

}  // namespace fsdp
