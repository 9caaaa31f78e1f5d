#include "core/pipeline.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

// Forwards without a backward (evaluation) are forgotten after so many calls. All that is lost is
// what to prefetch in the backward of a forward that old.
constexpr std::size_t kMostForwardCalls = 1 << 14;

}  // namespace

Pipeline::Pipeline(Lanes& lanes, PipelineOptions options)
    : lanes_(lanes),
      device_(*lanes.device),
      options_(options),
      world_size_(lanes.gather.communicator().size()),
      ledger_(device_),
      order_check_(device_, lanes.gather),
      gatherer_(device_, *lanes.packer, lanes.gather, ledger_,
                [this](const Bucket& bucket, std::size_t bytes) {
                  announce(Collective::AllGather, bucket, bytes);
                }),
      reducer_(device_, *lanes.packer, lanes.reduce, ledger_,
               [this](const Bucket& bucket, std::size_t bytes) {
                 announce(Collective::ReduceScatter, bucket, bytes);
               }) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "prefetch depth expects 0 or more but got ",
             options_.prefetch_depth);
}

int Pipeline::add_unit(UnitConfig config, UnitPort& port) {
  FSDP_CHECK(config.layout.world_size() == world_size_, "unit '", config.name,
             "' expects a layout for ", world_size_, " ranks but got one for ",
             config.layout.world_size());
  FSDP_CHECK(config.parent < unit_count(), "unit '", config.name,
             "' expects the unit that encloses it to come before it");
  units_.push_back(std::make_unique<Unit>(unit_count(), std::move(config), port));
  partition_is_old_ = true;
  memory_planned_ = false;
  return unit_count() - 1;
}

// - Forward

void Pipeline::begin_forward(int outermost) {
  if (in_forward_ || in_backward_) {
    reset_iteration();  // the last one ended in an exception
  }
  if (backward_ended_ || forward_calls_.size() > kMostForwardCalls) {
    forward_calls_.clear();
    backward_ended_ = false;
    for (const auto& unit : units_) {
      unit->ran = false;
    }
  }
  if (!awaiting_backward_ || ledger_.is_full()) {
    begin_times();
  }
  ledger_.enter_phase(Phase::Forward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Forward, kAllUnits);
  first_call_ = static_cast<int>(forward_calls_.size());
  // Units that stayed unsharded since an earlier forward follow shards that have changed.
  for (const auto& unit : units_) {
    unit->followed_version = unit->port.shard_version();
    if (unit->state != UnitState::Sharded && !gatherer_.is_current(*unit)) {
      gatherer_.release(*unit);
    }
  }
  if (!order_is_known_ && has_run(outermost)) {
    know_order();
  }
  plan();
  gatherer_.begin_iteration();
  in_forward_ = true;
  current_order_.clear();
  next_in_order_ = 0;
}

void Pipeline::end_forward(bool with_gradient) {
  in_forward_ = false;
  awaiting_backward_ = with_gradient;
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  first_forward_done_ = true;
  forward_order_.swap(current_order_);
  for (const auto& unit : units_) {
    if (unit->speculative) {  // gathered ahead, and did not run
      gatherer_.release(*unit);
    }
    unit->calls_to_recompute += with_gradient ? unit->calls_without_gradient : 0;
    unit->calls_without_gradient = 0;
  }
  gatherer_.join_capture();
}

void Pipeline::pre_forward(int number) {
  Unit& unit = unit_at(number);
  gatherer_.issue(unit, /*on_demand=*/true);
  if (in_backward_) {
    unit.recomputations += 1;
    prefetch_backward(unit, unit.last_forward_call);
  } else {
    note_forward(unit);
    prefetch_forward(unit);
  }
  begin_computing(unit, Work::UnitForward, gatherer_.attach(unit));
}

int Pipeline::post_forward(int number, bool with_gradient) {
  Unit& unit = unit_at(number);
  ledger_.close(unit.computing, device_.compute_stream());
  if (!in_backward_) {
    unit.last_forward_call = static_cast<int>(forward_calls_.size());
    forward_calls_.push_back({number, first_call_});
    unit.calls_without_gradient += with_gradient ? 0 : 1;
    unit.ran = unit.ran || with_gradient;
    if (!order_is_known_) {
      first_events_.push_back({number, false});
    }
    if (unit.reshard_after_forward) {
      gatherer_.release(unit);
      release_behind(unit);
    }
  }
  return unit.last_forward_call;
}

// Follows the recorded order, also where this forward leaves units out or runs them elsewhere.
void Pipeline::note_forward(const Unit& unit) {
  current_order_.push_back(unit.number);
  if (!order_is_known_) {
    first_events_.push_back({unit.number, true});
  }
  const auto from = forward_order_.begin() + static_cast<std::ptrdiff_t>(next_in_order_);
  const auto found = std::find(from, forward_order_.end(), unit.number);
  if (found != forward_order_.end()) {
    next_in_order_ = static_cast<std::size_t>(found - forward_order_.begin()) + 1;
  }
}

void Pipeline::prefetch_forward(const Unit& unit) {
  if (!unit.forward_prefetch.empty()) {
    for (const int target : unit.forward_prefetch) {
      gatherer_.issue(unit_at(target), /*on_demand=*/false);
    }
    return;
  }
  const Bucket* last = unit.bucket;
  int ahead = 0;
  for (std::size_t i = next_in_order_; i < forward_order_.size(); ++i) {
    Unit& target = unit_at(forward_order_[i]);
    if (target.bucket == last) {
      continue;
    }
    // Where no slot is free the next ones would not get one either.
    if (ahead == options_.prefetch_depth || !gatherer_.issue(target, /*on_demand=*/false)) {
      return;
    }
    last = target.bucket;
    ahead += 1;
  }
}

// A unit of the bucket that this forward, or backward, has left out would keep the slot, if no
// other is still to come.
void Pipeline::release_behind(Unit& unit) {
  Bucket& bucket = *unit.bucket;
  if (bucket.slot == nullptr) {
    return;
  }
  const std::size_t first = in_backward_ ? 0 : unit.position + 1;
  const std::size_t end = in_backward_ ? unit.position : bucket.units.size();
  for (std::size_t i = first; i < end; ++i) {
    if (bucket.units[i]->state != UnitState::Sharded) {
      return;
    }
  }
  gatherer_.release_leftovers(bucket);
}

// - Backward

void Pipeline::begin_backward() {
  in_backward_ = true;
  ledger_.enter_phase(Phase::Backward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Backward, kAllUnits);
}

void Pipeline::pre_backward(int number, int forward_call) {
  Unit& unit = unit_at(number);
  gatherer_.issue(unit, /*on_demand=*/true);
  prefetch_backward(unit, forward_call);
  begin_computing(unit, Work::UnitBackward, gatherer_.attach(unit));
}

void Pipeline::prefetch_backward(const Unit& unit, int forward_call) {
  if (!unit.backward_prefetch.empty()) {
    for (const int target : unit.backward_prefetch) {
      gatherer_.issue(unit_at(target), /*on_demand=*/false);
    }
    return;
  }
  if (forward_call < 0 || forward_call >= static_cast<int>(forward_calls_.size())) {
    return;  // of a forward that is over: backward runs a second time over its graph
  }
  const int first = forward_calls_[static_cast<std::size_t>(forward_call)].first;
  const Bucket* last = unit.bucket;
  int ahead = 0;
  for (int call = forward_call - 1; call >= first; --call) {
    Unit& target = unit_at(forward_calls_[static_cast<std::size_t>(call)].unit);
    if (target.bucket == last) {
      continue;
    }
    if (ahead == options_.prefetch_depth || !gatherer_.issue(target, /*on_demand=*/false)) {
      return;
    }
    last = target.bucket;
    ahead += 1;
  }
}

void Pipeline::gradient_arrived(int number, std::size_t trainable) {
  Unit& unit = unit_at(number);
  if (unit.arrived.at(trainable) != 0) {
    return;  // more of the same gradient, which autograd has added up
  }
  unit.arrived[trainable] = 1;
  unit.arrived_count += 1;
  if (unit.arrived_count == unit.arrived.size() && !awaits_recomputation(unit)) {
    complete(unit);
  }
}

void Pipeline::post_backward(int number) {
  Unit& unit = unit_at(number);
  if (unit.arrived_count > 0 && !awaits_recomputation(unit)) {
    complete(unit);
  }
  ledger_.close(unit.computing, device_.compute_stream());
  if (unit.reshard_after_backward) {
    gatherer_.release(unit);
    release_behind(unit);
  }
}

void Pipeline::end_backward() {
  // In reverse order of registration on every rank, which is about backward's own order.
  for (auto position = units_.rbegin(); position != units_.rend(); ++position) {
    Unit& unit = **position;
    ledger_.close(unit.computing, device_.compute_stream());
    if (unit.arrived_count > 0 || (unit.bucket->has_accumulated && unit.requires_gradient_sync)) {
      reducer_.take(*unit.bucket);
    }
    if (unit.reshard_after_backward || unit.speculative) {
      gatherer_.release(unit);
    }
    unit.calls_to_recompute = 0;
    unit.recomputations = 0;
  }
  if (is_last_backward_ || device_.is_capturing()) {
    reducer_.wait(buckets_);
  }
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  gatherer_.join_capture();
  in_backward_ = false;
  awaiting_backward_ = false;
  backward_ended_ = true;
  first_backward_done_ = true;
  if (!order_is_known_) {
    know_order();
  }
}

// A unit that runs again before its backward has passed it begins anew. Where it has waited, it
// begins with the end of that.
void Pipeline::begin_computing(Unit& unit, Work work, bool has_waited) {
  if (!ledger_.has_times()) {
    return;
  }
  Stream& compute = device_.compute_stream();
  ledger_.close(unit.computing, compute);
  const std::int32_t begin =
      has_waited ? ledger_.number_of(ledger_.last_compute_moment()) : ledger_.mark_compute();
  unit.computing = ledger_.open_at(begin, work, {unit.number, unit.number});
}

// See Note [reentrant checkpointing].
bool Pipeline::awaits_recomputation(const Unit& unit) const {
  return unit.recomputations < unit.calls_to_recompute;
}

// The bucket is reduced with the last of its units that ran. Units without trainable parameters,
// and units that take no part in the loss, are not waited for, but the latter until the end.
void Pipeline::complete(Unit& unit) {
  unit.complete = true;
  for (const Unit* other : unit.bucket->units) {
    if ((other->ran || other->calls_to_recompute > 0) && !other->complete &&
        !other->arrived.empty()) {
      return;
    }
  }
  reducer_.take(*unit.bucket);
}

// - By hand

void Pipeline::unshard(int number) {
  if (!in_forward_ && !in_backward_) {
    plan();
  }
  Unit& unit = unit_at(number);
  if (!in_forward_ && !in_backward_ && unit.state == UnitState::Sharded) {
    gatherer_.begin_iteration();  // the shards may have changed since the last one
  }
  gatherer_.issue(unit, /*on_demand=*/true);
}

void Pipeline::wait_for_unshard(int number) { gatherer_.attach(unit_at(number)); }

void Pipeline::reshard(int number) {
  Unit& unit = unit_at(number);
  gatherer_.release(unit);
  if (unit.bucket != nullptr && !in_forward_ && !in_backward_) {
    gatherer_.release_leftovers(*unit.bucket);
  }
}

void Pipeline::reset_iteration() {
  for (const auto& unit : units_) {
    gatherer_.release(*unit);
    unit->calls_to_recompute = 0;
    unit->calls_without_gradient = 0;
    unit->recomputations = 0;
    unit->ran = false;
  }
  for (const auto& bucket : buckets_) {
    reducer_.discard(*bucket);
  }
  in_forward_ = false;
  in_backward_ = false;
  backward_ended_ = false;
  awaiting_backward_ = false;
  ledger_.leave_iteration();
  ledger_.enter_phase(Phase::Other);
  forward_calls_.clear();
  current_order_.clear();
  if (!order_is_known_) {
    first_events_.clear();
  }
}

// - Settings

void Pipeline::set_reshard_after_forward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_forward != value) {
    unit.reshard_after_forward = value;
    partition_is_old_ = true;
    memory_planned_ = false;
  }
}

void Pipeline::set_reshard_after_backward(int number, bool value) {
  Unit& unit = unit_at(number);
  partition_is_old_ = partition_is_old_ || unit.reshard_after_backward != value;
  unit.reshard_after_backward = value;
}

void Pipeline::set_requires_gradient_sync(int number, bool value) {
  unit_at(number).requires_gradient_sync = value;
}

void Pipeline::set_gradient_scales(int number, double pack_scale, double reduce_scale) {
  Unit& unit = unit_at(number);
  partition_is_old_ =
      partition_is_old_ || unit.pack_scale != pack_scale || unit.reduce_scale != reduce_scale;
  unit.pack_scale = pack_scale;
  unit.reduce_scale = reduce_scale;
}

void Pipeline::set_forward_prefetch(int number, std::vector<int> targets) {
  std::vector<int>& of_unit = unit_at(number).forward_prefetch;
  memory_planned_ = memory_planned_ && of_unit == targets;
  of_unit = std::move(targets);
}

void Pipeline::set_backward_prefetch(int number, std::vector<int> targets) {
  std::vector<int>& of_unit = unit_at(number).backward_prefetch;
  memory_planned_ = memory_planned_ && of_unit == targets;
  of_unit = std::move(targets);
}

// Other buckets than those that ranks have compared.
void Pipeline::set_bucket_bytes(int number, std::size_t bytes) {
  Unit& unit = unit_at(number);
  if (unit.bucket_bytes != bytes) {
    unit.bucket_bytes = bytes;
    partition_is_old_ = true;
    compared_ = second_compared_ = false;
  }
}

void Pipeline::set_prefetch_depth(int depth) {
  memory_planned_ = memory_planned_ && options_.prefetch_depth == depth;
  options_.prefetch_depth = depth;
}

// What was refused a slot before does not count.
void Pipeline::begin_times() {
  ledger_.begin_iteration();
  if (ledger_.has_times()) {
    for (const auto& bucket : buckets_) {
      bucket->gather_issue = {};
    }
  }
}

// About what is marked: each unit's forward, backward and waits; each piece's copies and wire.
void Pipeline::keep_times(std::size_t iterations, bool drained) {
  constexpr std::size_t kOfAUnit = 12;
  constexpr std::size_t kOfAPiece = 8;
  std::size_t moments = kOfAUnit * (units_.size() + 1);
  for (const auto& bucket : buckets_) {
    moments += kOfAPiece * (bucket->gathers.size() + bucket->reductions.size());
  }
  ledger_.keep_times(iterations, moments, drained);
}

// - Buckets and memory

const Bucket& Pipeline::bucket_of(int number) {
  if (unit(number).bucket == nullptr) {
    form_buckets(partition());
  }
  return *unit(number).bucket;
}

// While a unit holds a slot of the ring (unsharded by hand), all stays as it is: later.
void Pipeline::plan() {
  if (!partition_is_old_ && memory_planned_) {
    return;
  }
  for (const auto& unit : units_) {
    if (unit->slot != nullptr && unit->slot != unit->bucket->home.get()) {
      return;
    }
  }
  if (partition_is_old_) {
    Partition next = partition();
    compare_ranks(next);
    if (next != partition_) {
      for (const auto& bucket : buckets_) {
        if (bucket->has_accumulated) {
          return;
        }
      }
      for (const auto& unit : units_) {
        gatherer_.release(*unit);  // kept since an earlier forward
      }
      form_buckets(next);
    }
    partition_is_old_ = false;
  }
  if (!memory_planned_) {
    plan_memory();
  }
}

// Those of the order of registration, and of the recorded one.
void Pipeline::compare_ranks(const Partition& partition) {
  if (options_.check_order && world_size_ > 1 &&
      !(order_is_known_ ? second_compared_ : compared_)) {
    order_check_.compare(partition, units_);
    compared_ = true;
    second_compared_ = order_is_known_;
  }
}

bool Pipeline::has_run(int number) const {
  const ForwardEvent entered{number, true};
  return std::find(first_events_.begin(), first_events_.end(), entered) != first_events_.end();
}

void Pipeline::know_order() {
  order_is_known_ = true;
  partition_is_old_ = true;
}

// See core/merging.h.
Partition Pipeline::partition() const {
  std::vector<MergeTraits> traits;
  std::vector<int> parents;
  for (const auto& unit : units_) {
    MergeTraits of_unit =
        merge_traits(unit->layout, unit->bucket_bytes, unit->port.gradient_dtype());
    of_unit.max_message_bytes = unit->max_message_bytes;
    of_unit.reshard_after_forward = unit->reshard_after_forward;
    of_unit.reshard_after_backward = unit->reshard_after_backward;
    of_unit.pack_scale = unit->pack_scale;
    of_unit.reduce_scale = unit->reduce_scale;
    traits.push_back(of_unit);
    parents.push_back(unit->parent);
  }
  return merge_units(traits, order_is_known_ ? first_events_ : events_of_registration(parents));
}

void Pipeline::form_buckets(const Partition& partition) {
  FSDP_CHECK(!device_.is_capturing(),
             "a CUDA graph capture expects all buckets to be formed; run a few whole steps before "
             "capturing one");
  reducer_.wait(buckets_);
  lanes_.gather.synchronize();
  lanes_.reduce.synchronize();
  for (const auto& unit : units_) {
    unit->bucket = nullptr;  // also where making one fails
  }
  buckets_.clear();
  partition_.clear();
  memory_planned_ = false;
  for (const std::vector<int>& numbers : partition) {
    std::vector<Unit*> units;
    units.reserve(numbers.size());
    for (const int number : numbers) {
      units.push_back(&unit_at(number));
    }
    buckets_.push_back(
        std::make_unique<Bucket>(static_cast<int>(buckets_.size()), std::move(units), lanes_));
  }
  partition_ = partition;
}

void Pipeline::plan_memory() {
  std::size_t depth = static_cast<std::size_t>(options_.prefetch_depth);
  for (const auto& unit : units_) {
    depth = std::max({depth, unit->forward_prefetch.size(), unit->backward_prefetch.size()});
  }
  FSDP_CHECK(!device_.is_capturing(),
             "a CUDA graph capture expects all buffers to exist; run a few whole steps before "
             "capturing one");
  const bool root_reshards = units_.front()->reshard_after_forward;
  gatherer_.plan_memory(buckets_, ring_slots(options_.nesting, depth, root_reshards));
  reducer_.plan_memory(buckets_);
  memory_planned_ = true;
}

// - Collectives

void Pipeline::announce(Collective op, const Bucket& bucket, std::size_t bytes) {
  if (comparing_ranks()) {
    order_check_.compare(op == Collective::AllGather ? "all-gather" : "reduce-scatter", bucket,
                         bytes);
  }
  ledger_.count_collective(op, bucket.numbers(), bytes);
}

// The first forward and the first backward.
bool Pipeline::comparing_ranks() const {
  if (!options_.check_order) {
    return false;
  }
  return in_backward_ ? !first_backward_done_ : !first_forward_done_;
}

}  // namespace fsdp
