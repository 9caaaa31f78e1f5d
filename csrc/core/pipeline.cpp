#include "core/pipeline.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {

Pipeline::Pipeline(Lanes& lanes, PipelineOptions options)
    : lanes_(lanes),
      device_(*lanes.device),
      options_(options),
      ledger_(device_),
      order_check_(device_, lanes.gather),
      bucket_set_(lanes, options_, units_, order_check_),
      gatherer_(device_, *lanes.packer, lanes.gather, ledger_,
                [this](const Bucket& bucket, std::size_t bytes) {
                  announce(Collective::AllGather, bucket, bytes);
                }),
      reducer_(device_, *lanes.packer, lanes.reduce, ledger_,
               [this](const Bucket& bucket, std::size_t bytes) {
                 announce(Collective::ReduceScatter, bucket, bytes);
               }),
      reduction_order_(units_, reducer_),
      exchange_(lanes, options_.has_peers) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "The prefetch depth is ", options_.prefetch_depth,
             ". It must be 0 or more.");
}

int Pipeline::add_unit(UnitConfig config, UnitPort& port) {
  const int world_size = lanes_.gather.communicator().size();
  FSDP_CHECK(config.layout.world_size() == world_size, "Unit '", config.name, "' has a layout for ",
             config.layout.world_size(), " ranks. It needs one for ", world_size, ".");
  FSDP_CHECK(config.parent < unit_count(), "Unit '", config.name,
             "' was added before the unit that encloses it. Add the enclosing unit first.");
  if (config.parent >= 0) {
    unit_at(config.parent).encloses_units = true;
  }
  units_.push_back(std::make_unique<Unit>(unit_count(), std::move(config), port));
  bucket_set_.invalidate_partition();
  bucket_set_.invalidate_memory();
  return unit_count() - 1;
}

// - Forward

void Pipeline::begin_forward(int outermost) {
  if (!is_between_passes()) {
    reset_iteration();  // the last one ended in an exception
  }
  if (order_.has_stale_calls()) {
    order_.forget_calls();
    forget_forwards();
  }
  if (state_ != PipelineState::AwaitingBackward || ledger_.is_full() || !ledger_.has_times()) {
    begin_times();
  }
  ledger_.enter_phase(Phase::Forward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Forward, kAllUnits);
  drop_outdated_parameters();
  if (!order_.is_recorded() && order_.has_entered(outermost)) {
    finish_recording();
  }
  bucket_set_.update(order_, gatherer_, reducer_);
  gatherer_.begin_iteration();
  order_.begin_forward();
  state_ = PipelineState::Forward;
}

// Forgets which units the forwards since the last backward ran.
void Pipeline::forget_forwards() {
  for (const auto& unit : units_) {
    unit->ran = false;
    unit->calls = 0;
    unit->is_skipped = false;
    unit->entered = Unit::kNever;
  }
  entered_count_ = 0;
}

// Units that stayed unsharded since an earlier forward are gathered again if their shards changed.
void Pipeline::drop_outdated_parameters() {
  for (const auto& unit : units_) {
    unit->followed_version = unit->port.shard_version();
    if (unit->state != UnitState::Sharded && !gatherer_.is_current(*unit)) {
      gatherer_.reshard(*unit);
    }
  }
}

void Pipeline::end_forward(bool with_gradient) {
  state_ = in_backward()   ? PipelineState::Backward
           : with_gradient ? PipelineState::AwaitingBackward
                           : PipelineState::Idle;
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  order_check_.end_forward();
  order_.end_forward();
  for (const auto& unit : units_) {
    if (unit->is_speculative) {  // prefetched, and did not run
      gatherer_.reshard(*unit);
    }
    unit->calls_to_recompute += with_gradient ? unit->calls_without_gradient : 0;
    unit->calls_without_gradient = 0;
  }
  if (state_ == PipelineState::Idle) {
    end_evaluation();
  }
  gatherer_.join_capture();
}

// See Note [after an evaluation].
void Pipeline::end_evaluation() {
  for (const auto& unit : units_) {
    if (unit->state == UnitState::Unsharded && !unit->is_held &&
        !unit->keeps_slot_after_evaluation) {
      gatherer_.reshard(*unit);
    }
  }
  put_away_parameters();
}

void Pipeline::put_away_parameters() {
  for (const auto& unit : units_) {
    if (unit->state == UnitState::Unsharded && !unit->is_put_away && !unit->is_held) {
      unit->is_put_away = true;
      unit->port.show_sharded();
    }
  }
}

void Pipeline::pre_forward(int number) {
  Unit& unit = unit_at(number);
  gatherer_.unshard(unit, /*on_demand=*/true);
  if (in_backward()) {
    unit.recomputations += 1;
    prefetch_backward(unit, unit.last_forward_call);
  } else {
    order_.enter(number);
    if (unit.entered == Unit::kNever) {
      unit.entered = entered_count_++;
    }
    prefetch_forward(unit);
  }
  begin_computing(unit, Work::UnitForward, gatherer_.attach(unit));
}

int Pipeline::post_forward(int number, bool with_gradient) {
  Unit& unit = unit_at(number);
  ledger_.close(unit.computing, device_.compute_stream());
  if (!in_backward()) {
    unit.last_forward_call = order_.leave(number);
    unit.calls_without_gradient += with_gradient ? 0 : 1;
    unit.calls += with_gradient ? 1 : 0;
    unit.ran = unit.ran || with_gradient;
    if (unit.reshard_after_forward) {
      gatherer_.reshard(unit);
      reshard_behind(unit);
    }
  }
  return unit.last_forward_call;
}

void Pipeline::skip(int number) {
  unit_at(number).is_skipped = true;
  reduction_order_.expect_unused();
}

void Pipeline::prefetch_forward(const Unit& unit) {
  prefetch(unit, unit.forward_prefetch,
           [this](std::size_t ahead) { return order_.upcoming(ahead); });
}

// The user's targets, or else the next buckets.
template <typename UnitAhead>
void Pipeline::prefetch(const Unit& unit, const std::vector<int>& targets,
                        const UnitAhead& unit_ahead) {
  for (const int target : targets) {
    gatherer_.unshard(unit_at(target), /*on_demand=*/false);
  }
  if (!targets.empty()) {
    return;
  }
  const Bucket* last = unit.bucket;
  int buckets_ahead = 0;
  for (std::size_t ahead = 0; buckets_ahead < options_.prefetch_depth; ++ahead) {
    const int number = unit_ahead(ahead);
    if (number == ForwardOrder::kNoUnit) {
      return;
    }
    Unit& target = unit_at(number);
    if (target.bucket == last) {
      continue;
    }
    if (!gatherer_.unshard(target, /*on_demand=*/false)) {
      return;  // no slot is free, so the next ones would not get one either
    }
    last = target.bucket;
    buckets_ahead += 1;
  }
}

// A unit that this pass has left out would keep the bucket's slot. So the slot is released if none
// of the bucket's units are still to come.
void Pipeline::reshard_behind(Unit& unit) {
  Bucket& bucket = *unit.bucket;
  if (bucket.slot == nullptr) {
    return;
  }
  const std::size_t first = in_backward() ? 0 : unit.position + 1;
  const std::size_t end = in_backward() ? unit.position : bucket.units.size();
  for (std::size_t i = first; i < end; ++i) {
    if (bucket.units[i]->state != UnitState::Sharded) {
      return;
    }
  }
  gatherer_.reshard_speculative(bucket);
}

// - Backward

void Pipeline::begin_backward(bool may_reshard) {
  backward_may_reshard_ = may_reshard;
  state_ = in_forward() ? PipelineState::BackwardInForward : PipelineState::Backward;
  ledger_.enter_phase(Phase::Backward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Backward, kAllUnits);
  for (const auto& unit : units_) {
    unit->passes = 0;
    unit->is_reduced = false;
    std::fill(unit->used.begin(), unit->used.end(), 0);
  }
}

void Pipeline::pre_backward(int number, int forward_call) {
  Unit& unit = unit_at(number);
  gatherer_.unshard(unit, /*on_demand=*/true);
  prefetch_backward(unit, forward_call);
  begin_computing(unit, Work::UnitBackward, gatherer_.attach(unit));
}

void Pipeline::prefetch_backward(const Unit& unit, int forward_call) {
  prefetch(unit, unit.backward_prefetch, [this, forward_call](std::size_t ahead) {
    return order_.preceding(forward_call, ahead);
  });
}

void Pipeline::gradient_arrived(int number, std::size_t trainable) {
  reduction_order_.gradient_arrived(unit_at(number), trainable);
}

void Pipeline::post_backward(int number) {
  Unit& unit = unit_at(number);
  reduction_order_.leave(unit);
  ledger_.close(unit.computing, device_.compute_stream());
  if (unit.reshard_after_backward && backward_may_reshard_) {
    gatherer_.reshard(unit);
    reshard_behind(unit);
  }
}

void Pipeline::end_backward() {
  reduction_order_.end_backward();
  exchange_.begin(units_);
  for (auto position = units_.rbegin(); position != units_.rend(); ++position) {
    Unit& unit = **position;
    ledger_.close(unit.computing, device_.compute_stream());
    if ((unit.reshard_after_backward && backward_may_reshard_) || unit.is_speculative) {
      gatherer_.reshard(unit);
    }
    unit.calls_to_recompute = 0;
    unit.recomputations = 0;
  }
  exchange_.end(units_);  // before a wait for a reduction that not all ranks have issued
  if (is_last_backward_ || device_.is_capturing()) {
    reducer_.wait(buckets());
  }
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  gatherer_.join_capture();
  state_ = in_forward() ? PipelineState::Forward : PipelineState::Idle;
  order_check_.end_backward();
  order_.end_backward();
  if (!order_.is_recorded()) {
    finish_recording();
  }
}

void Pipeline::finish_recording() {
  order_.finish_recording();
  bucket_set_.invalidate_partition();
}

// A unit that runs again before its backward has passed it gets a new span. The span begins where
// the wait for its gather ended, if there was one.
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

// - unshard() and reshard(), called by the user

void Pipeline::unshard(int number) {
  if (is_between_passes()) {
    bucket_set_.update(order_, gatherer_, reducer_);
  }
  Unit& unit = unit_at(number);
  if (unit.is_put_away) {
    gatherer_.reshard(unit);  // its users may have changed the shards since
  }
  if (is_between_passes() && unit.state == UnitState::Sharded) {
    gatherer_.begin_iteration();  // the shards may have changed since the last one
  }
  gatherer_.unshard(unit, /*on_demand=*/true);
}

void Pipeline::wait_for_unshard(int number) {
  Unit& unit = unit_at(number);
  gatherer_.attach(unit);
  unit.is_held = is_between_passes();
}

void Pipeline::reshard(int number) {
  Unit& unit = unit_at(number);
  gatherer_.reshard(unit);
  if (unit.bucket != nullptr && is_between_passes()) {
    gatherer_.reshard_speculative(*unit.bucket);
  }
}

void Pipeline::reset_iteration() {
  for (const auto& unit : units_) {
    gatherer_.reshard(*unit);
    unit->calls_to_recompute = 0;
    unit->calls_without_gradient = 0;
    unit->recomputations = 0;
  }
  forget_forwards();
  reduction_order_.reset();
  for (const auto& bucket : buckets()) {
    reducer_.discard(*bucket);
  }
  state_ = PipelineState::Idle;
  ledger_.leave_iteration();
  ledger_.enter_phase(Phase::Other);
  order_.reset();
}

// - Settings

void Pipeline::set_reshard_after_forward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_forward != value) {
    unit.reshard_after_forward = value;
    bucket_set_.invalidate_partition();
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_keeps_slot_after_evaluation(int number, bool value) {
  unit_at(number).keeps_slot_after_evaluation = value;
}

void Pipeline::set_reshard_after_backward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_backward != value) {
    unit.reshard_after_backward = value;
    bucket_set_.invalidate_partition();
  }
}

void Pipeline::set_requires_gradient_sync(int number, bool value) {
  unit_at(number).requires_gradient_sync = value;
}

void Pipeline::set_reduces_unused(int number, bool value) {
  unit_at(number).reduces_unused = value;
  if (value) {
    reduction_order_.expect_unused();
  }
}

void Pipeline::set_gradient_scales(int number, double pack_scale, double reduce_scale) {
  Unit& unit = unit_at(number);
  if (unit.pack_scale != pack_scale || unit.reduce_scale != reduce_scale) {
    unit.pack_scale = pack_scale;
    unit.reduce_scale = reduce_scale;
    bucket_set_.invalidate_partition();
  }
}

void Pipeline::set_forward_prefetch(int number, std::vector<int> targets) {
  Unit& unit = unit_at(number);
  if (unit.forward_prefetch != targets) {
    unit.forward_prefetch = std::move(targets);
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_backward_prefetch(int number, std::vector<int> targets) {
  Unit& unit = unit_at(number);
  if (unit.backward_prefetch != targets) {
    unit.backward_prefetch = std::move(targets);
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_bucket_bytes(int number, std::size_t bytes) {
  Unit& unit = unit_at(number);
  if (unit.bucket_bytes != bytes) {
    unit.bucket_bytes = bytes;
    bucket_set_.invalidate_partition();
    bucket_set_.invalidate_comparison();
  }
}

void Pipeline::set_prefetch_depth(int depth) {
  if (options_.prefetch_depth != depth) {
    options_.prefetch_depth = depth;
    bucket_set_.invalidate_memory();
  }
}

// - Measurements and checks

// Refusals of an earlier iteration do not count.
void Pipeline::begin_times() {
  ledger_.begin_iteration();
  if (ledger_.has_times()) {
    for (const auto& bucket : buckets()) {
      bucket->gather_issue = {};
    }
  }
}

// The number of moments is an estimate: each unit's forward, backward and waits, and each piece's
// copies and message.
void Pipeline::keep_times(std::size_t iterations, bool drained) {
  constexpr std::size_t kOfAUnit = 12;
  constexpr std::size_t kOfAPiece = 8;
  std::size_t moments = kOfAUnit * (units_.size() + 1);
  for (const auto& bucket : buckets()) {
    moments += kOfAPiece * (bucket->gathers.size() + bucket->reductions.size());
  }
  ledger_.keep_times(iterations, moments, drained);
}

void Pipeline::form_buckets() {
  if (!units_.empty() && units_.front()->bucket == nullptr) {
    bucket_set_.form(order_, reducer_);
  }
}

const Bucket& Pipeline::bucket_of(int number) const {
  const Unit& asked = unit(number);
  FSDP_CHECK(asked.bucket != nullptr, "Unit '", asked.name,
             "' has no bucket yet. Call form_buckets() before.");
  return *asked.bucket;
}

void Pipeline::announce(Collective op, const Bucket& bucket, std::size_t bytes) {
  const bool gathers = op == Collective::AllGather;
  if (gathers && options_.check_order && order_check_.is_due(in_backward())) {
    order_check_.compare(bucket, bytes);
  }
  Lane& lane = gathers ? lanes_.gather : lanes_.reduce;
  const std::string& label = gathers ? bucket.gather_label : bucket.reduce_label;
  const std::uint64_t identity = mix(bucket.identity, static_cast<std::uint64_t>(op));
  lane.communicator().announce(label, lane.history().add(identity, label, bytes));
  ledger_.count_collective(op, bucket.numbers(), bytes);
}

}  // namespace fsdp
