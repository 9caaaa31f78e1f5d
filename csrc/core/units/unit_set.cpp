#include "core/units/unit_set.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "core/memory/memory_plan.h"
#include "core/units/unsharded_together.h"

namespace fsdp {

UnitSet::UnitSet(Lanes& lanes, const PipelineOptions& options, ForwardOrder& forward_order,
                 Gatherer& gatherer, Reducer& reducer, OrderCheck& order_check,
                 RankExchange& exchange)
    : lanes_(lanes),
      options_(options),
      forward_order_(forward_order),
      gatherer_(gatherer),
      reducer_(reducer),
      order_check_(order_check),
      exchange_(exchange) {}

int UnitSet::add(UnitConfig config, UnitPort& port) {
  const auto number = static_cast<int>(units_.size());
  const int world_size = lanes_.of_mesh(config.mesh).gather.communicator().size();
  FSDP_CHECK(config.layout.world_size() == world_size, "Unit '", config.name, "' has a layout for ",
             config.layout.world_size(), " ranks. It needs one for ", world_size, ".");
  FSDP_CHECK(config.parent < number, "Unit '", config.name,
             "' was added before the unit that encloses it. Add the enclosing unit first.");
  units_.push_back(std::make_unique<Unit>(number, std::move(config), port));
  invalidate_partition();
  invalidate_memory();
  return number;
}

void UnitSet::apply(int number, UnitSettings settings) {
  Unit& unit = at(number);
  const bool limits_differ =
      unit.bucket_bytes != settings.bucket_bytes || unit.is_unmergeable != settings.is_unmergeable;
  if (limits_differ) {
    compared_ = Compared::Nothing;  // the ranks compare the next partition
  }
  if (limits_differ || !unit.reshard_alike(settings) || !unit.scale_alike(settings)) {
    invalidate_partition();
  }
  const bool reads_differ = unit.reads_whole_output != settings.reads_whole_output;
  if ((reads_differ && unit.bucket != nullptr && unit.bucket->reduction.is_in_pieces()) ||
      unit.reshard_after_forward != settings.reshard_after_forward ||
      unit.reshard_group != settings.reshard_group ||
      unit.forward_prefetch != settings.forward_prefetch ||
      unit.backward_prefetch != settings.backward_prefetch) {
    invalidate_memory();
  }
  static_cast<UnitSettings&>(unit) = std::move(settings);
}

void UnitSet::put_away_parameters() {
  for (const auto& unit : units_) {
    unit->gather.put_away(unit->port);
  }
}

void UnitSet::update() {
  if (!is_stale() || is_ring_in_use()) {
    return;
  }
  if (partition_is_stale_) {
    const Partition next = partition();
    compare_ranks(next);
    const bool differs = next != partition_ || has_other_groups();
    if (differs) {
      refuse_after_capture();
    }
    const bool waits = differs && any_rank_has_accumulated();
    if (differs && !waits) {
      for (const auto& unit : units_) {
        gatherer_.reshard(*unit);  // it stayed unsharded since an earlier forward
      }
      form(next);
    }
    partition_is_stale_ = waits;
    note_order();
  }
  if (!memory_is_planned()) {
    plan_memory();
  }
}

// Places in the ring are for the order of registration. If any rank has run forward in another
// order, slots are equal on all ranks from then on, since ranks allocate the ring together.
void UnitSet::note_order() {
  const bool is_other =
      forward_order_.is_recorded() && !are_in_order_of_registration(forward_order_.first_events());
  const bool any_is_other = lanes_.gather.most(is_other ? 1 : 0, forward_order_.is_recorded()) > 0;
  if (any_is_other != runs_in_other_order_) {
    refuse_after_capture();
    runs_in_other_order_ = any_is_other;
    invalidate_memory();
  }
}

bool UnitSet::is_ring_in_use() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return unit->gather.slot() != nullptr &&
           unit->gather.slot() != unit->bucket->gather.persistent_slot();
  });
}

// Ranks that use different parameters have accumulated gradients of different ones.
bool UnitSet::any_rank_has_accumulated() const {
  if (buckets_.empty() || lanes_.device->is_capturing()) {
    return have_accumulated(buckets_);
  }
  static const std::string kWhat = "the exchange before buckets are formed";
  const std::vector<std::string> of_all =
      exchange_.all_gather(kWhat, have_accumulated(buckets_) ? "1" : "0");
  return std::find(of_all.begin(), of_all.end(), "1") != of_all.end();
}

// A bucket has what it needs for its group from the start: Note [group shards].
bool UnitSet::has_other_groups() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) {
    const GroupShard* const group = bucket->gather.group();
    const int ranks = group != nullptr ? group->source.communicator.size() : 0;
    return ranks != bucket->units.front()->reshard_group;
  });
}

// See core/units/merging.h.
Partition UnitSet::partition() const {
  const std::vector<const UnitConfig*> units = configs();
  return merge_units(units, forward_order_.is_recorded()
                                ? forward_order_.first_events()
                                : events_of_registration(parents_of(units)));
}

std::vector<const UnitConfig*> UnitSet::configs() const {
  std::vector<const UnitConfig*> configs;
  for (const auto& unit : units_) {
    configs.push_back(unit.get());
  }
  return configs;
}

void UnitSet::compare_ranks(const Partition& partition) {
  const Compared target =
      forward_order_.is_recorded() ? Compared::Recorded : Compared::Registration;
  if (options_.check_order && compared_ < target) {
    order_check_.compare(partition, units_);
    compared_ = target;
  }
}

void UnitSet::form_if_none() {
  if (!units_.empty() && units_.front()->bucket == nullptr) {
    form(partition());
  }
}

void UnitSet::form(const Partition& partition) {
  FSDP_CHECK(!lanes_.device->is_capturing(),
             "A CUDA graph capture cannot form buckets. Run a few whole steps before capturing "
             "one.");
  reducer_.wait(buckets_);
  gatherer_.synchronize();
  reducer_.synchronize();
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

void UnitSet::plan_memory() {
  FSDP_CHECK(!lanes_.device->is_capturing(),
             "A CUDA graph capture cannot allocate buffers. Run a few whole steps before capturing "
             "one.");
  refuse_after_capture();
  std::size_t depth = static_cast<std::size_t>(options_.prefetch_depth);
  bool has_prefetch_lists = false;
  for (const auto& unit : units_) {
    depth = std::max({depth, unit->forward_prefetch.size(), unit->backward_prefetch.size()});
    has_prefetch_lists =
        has_prefetch_lists || !unit->forward_prefetch.empty() || !unit->backward_prefetch.empty();
  }
  const Unit& root = *units_.front();
  gatherer_.plan_memory(
      buckets_, ring_slots(options_.nesting, depth, root.reshard_after_forward, root.layout),
      has_prefetch_lists || runs_in_other_order_
          ? BucketSets{}
          : unsharded_together(partition_, parents_of(configs()), uses_of(buckets_), depth),
      options_.keeps_gather_inputs);
  reducer_.plan_memory(buckets_);
  planned_depth_ = options_.prefetch_depth;
}

}  // namespace fsdp
