#include "core/schedule/pipeline.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/record/flight_recorder.h"

namespace fsdp {

Pipeline::Pipeline(Lanes& lanes, PipelineOptions options, Lanes* replicas)
    : lanes_(lanes),
      replicas_(replicas),
      device_(*lanes.device),
      options_(options),
      ledger_(device_),
      order_check_(device_, lanes.gather, replicas == nullptr ? nullptr : &replicas->gather),
      bucket_set_(lanes, options_, units_, order_check_),
      gatherer_(device_, *lanes.packer, lanes.gather, ledger_,
                [this](const Bucket& bucket, const NextMessage& message) {
                  announce(bucket.gather.source().op, bucket, message);
                }),
      reducer_(device_, *lanes.packer, ledger_,
               {&lanes.reduce,
                [this](const Bucket& bucket, const NextMessage& message) {
                  announce(Collective::ReduceScatter, bucket, message);
                }},
               {replicas == nullptr ? nullptr : &replicas->reduce,
                [this](const Bucket& bucket, const NextMessage& message) {
                  announce(Collective::AllReduce, bucket, message);
                }}),
      reduction_order_(units_, reducer_),
      exchange_(lanes, replicas, options_.has_peers) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "The prefetch depth is ", options_.prefetch_depth,
             ". It must be 0 or more.");
}

int Pipeline::add_unit(UnitConfig config, UnitPort& port) {
  const int world_size = lanes_.of_mesh(config.mesh).gather.communicator().size();
  FSDP_CHECK(config.layout.world_size() == world_size, "Unit '", config.name, "' has a layout for ",
             config.layout.world_size(), " ranks. It needs one for ", world_size, ".");
  FSDP_CHECK(config.parent < unit_count(), "Unit '", config.name,
             "' was added before the unit that encloses it. Add the enclosing unit first.");
  units_.push_back(std::make_unique<Unit>(unit_count(), std::move(config), port));
  expect_unused(*units_.back());
  bucket_set_.invalidate_partition();
  bucket_set_.invalidate_memory();
  return unit_count() - 1;
}

// - Forward

void Pipeline::begin_forward(int outermost, bool with_gradient) try {
  if (!is_between_passes()) {
    recover();  // the last iteration ended in an exception
  }
  if (state_ != PipelineState::AwaitingBackward || ledger_.is_full() || !ledger_.has_times()) {
    begin_times();
  }
  ledger_.enter_phase(Phase::Forward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Forward, kAllUnits);
  const bool has_changed = drop_outdated_parameters();
  if (!forward_order_.is_recorded() && forward_order_.has_entered(outermost)) {
    finish_recording();
  }
  bucket_set_.update(forward_order_, gatherer_, reducer_, exchange_);
  gatherer_.begin_iteration();
  forward_order_.begin_forward(/*forgets_all=*/has_changed);
  forward_keeps_ = with_gradient;
  state_ = PipelineState::Forward;
} catch (const Error& error) {
  fail(error);
}

// Units that stayed unsharded since an earlier forward are gathered again if their shards changed.
// Returns whether any shards changed. Then the graphs of earlier forwards are out of date.
bool Pipeline::drop_outdated_parameters() {
  bool has_changed = false;
  for (const auto& unit : units_) {
    const std::uint64_t version = unit->port.shard_version();
    has_changed = has_changed || unit->followed_version != version;
    unit->followed_version = version;
    unit->entering = kNoCall;  // of a forward that ended in an exception
    if (unit->state != UnitState::Sharded && !gatherer_.is_current(*unit)) {
      gatherer_.reshard(*unit);
    }
  }
  return has_changed;
}

void Pipeline::end_forward(bool with_gradient) try {
  state_ = in_backward()   ? PipelineState::Backward
           : with_gradient ? PipelineState::AwaitingBackward
                           : PipelineState::Idle;
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  order_check_.end_forward();
  forward_order_.end_forward();
  for (const auto& unit : units_) {
    if (unit->is_speculative) {  // prefetched, and did not run
      gatherer_.reshard(*unit);
    }
  }
  gatherer_.end_keeping();
  if (state_ == PipelineState::Idle) {
    end_evaluation();
  }
  gatherer_.finish_reading_host();
  gatherer_.join_capture();
} catch (const Error& error) {
  fail(error);
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
    unit->put_away();
  }
}

CallId Pipeline::pre_forward(int number) try {
  Unit& unit = unit_at(number);
  if (unit.is_summoned) {
    return in_backward() ? kNoCall : enter_forward(unit);
  }
  if (in_backward()) {
    recompute(unit);
  } else {
    gatherer_.unshard(unit, /*on_demand=*/true);
    enter_forward(unit);
    prefetch_forward(unit);
  }
  begin_computing(unit, Work::UnitForward, gatherer_.attach(unit));
  return unit.entering;
} catch (const Error& error) {
  fail(error);
}

CallId Pipeline::enter_forward(Unit& unit) {
  if (unit.entering == kNoCall) {
    unit.entering = forward_order_.enter(unit.number);
  }
  return unit.entering;
}

CallId Pipeline::post_forward(int number, bool with_gradient) try {
  Unit& unit = unit_at(number);
  const CallId call = std::exchange(unit.entering, kNoCall);
  ledger_.close(unit.computing, device_.compute_stream());
  if (!in_backward()) {
    forward_order_.leave(call, with_gradient);
    if (unit.reshard_after_forward && !unit.is_summoned) {
      if (forward_keeps_) {
        gatherer_.keep_for_backward(unit);
      }
      gatherer_.reshard(unit);
      reshard_behind(unit);
    }
  } else if (BackwardOrder::is_recomputed_call(call)) {
    backward_order_.leave(call, number);
    unit.gathers_left += 1;
  } else {
    unit.entering = call;  // forward runs the unit, and a backward inside runs it again
    return kNoCall;
  }
  return call;
} catch (const Error& error) {
  fail(error);
}

void Pipeline::expect(CallId call) { forward_order_.expect(call); }

void Pipeline::prefetch_forward(const Unit& unit) {
  prefetch(unit, unit.forward_prefetch,
           [this, ahead = std::size_t{0}]() mutable { return forward_order_.upcoming(ahead++); });
}

// The user's targets, or else the next buckets.
template <typename NextUnit>
void Pipeline::prefetch(const Unit& unit, const std::vector<int>& targets, NextUnit next_unit) {
  for (const int target : targets) {
    if (!in_backward() || unit_at(target).unshards_in_backward) {
      gatherer_.unshard(unit_at(target), /*on_demand=*/false);
    }
  }
  if (!targets.empty()) {
    return;
  }
  const Bucket* last = unit.bucket;
  int buckets_ahead = 0;
  while (buckets_ahead < options_.prefetch_depth) {
    const int number = next_unit();
    if (number == ForwardOrder::kNoUnit) {
      return;
    }
    Unit& target = unit_at(number);
    if (target.bucket == last || target.is_summoned) {
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
  if (bucket.gather.slot() == nullptr) {
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

void Pipeline::begin_backward(bool may_reshard, const BackwardGraph& graph) {
  backward_may_reshard_ = may_reshard;
  backward_accumulates_ = graph.accumulates;
  backward_order_.begin(forward_order_.passes(), graph, /*keeps=*/in_forward());
  reducer_.begin_backward();
  reduction_order_.begin_backward(backward_order_.steps());
  state_ = in_forward() ? PipelineState::BackwardInForward : PipelineState::Backward;
  ledger_.enter_phase(Phase::Backward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Backward, kAllUnits);
}

void Pipeline::pre_backward(int number, CallId call) try {
  Unit& unit = unit_at(number);
  if (unit.gathers_left > 0) {
    take_steps(backward_order_.until_gather(call));
  }
  if (unit.state != UnitState::Unsharded || unit.is_put_away) {  // the call has no step
    gather_in_backward(unit);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::gradient_arrived(int number, std::size_t trainable, bool is_inner) try {
  Unit& unit = unit_at(number);
  if (is_inner) {
    unit.note_inner_gradient();
  }
  reducer_.note_arrival(*unit.bucket);
  reduction_order_.gradient_arrived(unit, trainable);
} catch (const Error& error) {
  fail(error);
}

void Pipeline::post_backward(int number, CallId call) try {
  Unit& unit = unit_at(number);
  if (unit.passes_left > 0) {
    take_steps(backward_order_.until_pass(call));
  }
  if (unit.passes_left == 0) {  // and otherwise if the call has no step
    reshard_in_backward(unit);
  }
} catch (const Error& error) {
  fail(error);
}

// Ranks that do not answer, or differ, are found in any call that waits.
void Pipeline::fail(const Error& error) { throw_with_flight_record(error, lanes_, replicas_); }

void Pipeline::take_steps(std::size_t count) {
  for (; count > 0; --count) {
    take(backward_order_.take());
  }
}

void Pipeline::take(const BackwardStep& step) {
  Unit& unit = unit_at(step.unit);
  switch (step.action) {
    case BackwardAction::Gather:
      unit.gathers_left -= 1;
      unit.sends_zeros = backward_accumulates_;
      unit.awaits_reduction = unit.awaits_reduction || unit.leaves_gradients();
      gather_in_backward(unit);
      return;
    case BackwardAction::Pass:
      unit.passes_left -= 1;
      reduction_order_.advance();
      reshard_in_backward(unit);
      return;
    case BackwardAction::Recompute:
      unit.recomputations_left -= 1;
      reduction_order_.advance();
      return;
    case BackwardAction::Recomputed:
      return;
  }
}

void Pipeline::gather_in_backward(Unit& unit) {
  if (unit.unshards_in_backward) {
    gatherer_.unshard(unit, /*on_demand=*/true);
  }
  prefetch_backward(unit);
  const bool has_waited = unit.state != UnitState::Sharded && gatherer_.attach(unit);
  begin_computing(unit, Work::UnitBackward, has_waited);
}

void Pipeline::reshard_in_backward(Unit& unit) {
  ledger_.close(unit.computing, device_.compute_stream());
  const bool is_read_again = is_second_backward_ && !unit.reshard_after_forward;
  if (unit.reshard_after_backward && backward_may_reshard_ && !is_read_again) {
    gatherer_.reshard(unit);
    reshard_behind(unit);
  }
}

void Pipeline::prefetch_backward(const Unit& unit) {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  prefetch(unit, unit.backward_prefetch, [this, &steps, next = steps.size()]() mutable {
    while (next > 0) {
      next -= 1;
      const bool gathers = steps[next].action == BackwardAction::Gather &&
                           unit_at(steps[next].unit).unshards_in_backward;
      if (gathers || steps[next].action == BackwardAction::Recompute) {
        return steps[next].unit;
      }
    }
    return ForwardOrder::kNoUnit;
  });
}

// Forward runs again inside backward.
void Pipeline::recompute(Unit& unit) {
  if (unit.entering == kNoCall && backward_order_.is_recomputed(unit.number)) {
    take_steps(backward_order_.until_recomputation(unit.number));
    unit.entering = backward_order_.enter(unit.number);
    unit.recomputations_left -= 1;
    unit.passes_left += 1;
  }
  const bool is_new = unit.state != UnitState::Unsharded;
  gatherer_.unshard(unit, /*on_demand=*/true);
  if (is_new) {
    prefetch_backward(unit);
  }
}

void Pipeline::end_backward() try {
  take_steps(backward_order_.steps().size());
  reduction_order_.end_backward();
  exchange_.begin(units_);
  for (auto position = units_.rbegin(); position != units_.rend(); ++position) {
    Unit& unit = **position;
    ledger_.close(unit.computing, device_.compute_stream());
    if ((unit.reshard_after_backward && backward_may_reshard_) || unit.is_speculative) {
      gatherer_.reshard(unit);
    } else if (unit.reshard_after_backward && backward_accumulates_ && !in_forward()) {
      unit.put_away();
    }
  }
  gatherer_.forget_group_shards();  // another backward may follow an optimizer's step
  exchange_.end(units_);            // before a wait for a reduction that not all ranks have issued
  if (is_last_backward_ || device_.is_capturing()) {
    reducer_.wait(buckets());
  }
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  gatherer_.join_capture();
  state_ = in_forward() ? PipelineState::Forward : PipelineState::Idle;
  is_second_backward_ = !backward_may_reshard_;
  order_check_.end_backward();
  if (!forward_order_.is_recorded()) {
    finish_recording();
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::finish_recording() {
  forward_order_.finish_recording();
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

void Pipeline::unshard(int number) try {
  if (is_between_passes()) {
    bucket_set_.update(forward_order_, gatherer_, reducer_, exchange_);
  }
  Unit& unit = unit_at(number);
  if (unit.is_put_away) {
    gatherer_.reshard(unit);  // its users may have changed the shards since
  }
  if (is_between_passes() && unit.state == UnitState::Sharded) {
    gatherer_.begin_iteration();  // the shards may have changed since the last one
  }
  gatherer_.unshard(unit, /*on_demand=*/true);
  hold(unit);
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_for_unshard(int number) try {
  Unit& unit = unit_at(number);
  if (unit.state == UnitState::Gathering) {
    gatherer_.attach(unit);
    hold(unit);
  }
} catch (const Error& error) {
  fail(error);
}

// See Note [after an evaluation].
void Pipeline::hold(Unit& unit) {
  if (unit.state == UnitState::Unsharded) {
    unit.is_held = is_between_passes();
  }
}

void Pipeline::reshard(int number) {
  Unit& unit = unit_at(number);
  gatherer_.reshard(unit);
  if (unit.bucket != nullptr && is_between_passes()) {
    gatherer_.reshard_speculative(*unit.bucket);
  }
}

void Pipeline::forget(int number) {
  Bucket* bucket = unit_at(number).bucket;
  if (bucket != nullptr) {
    gatherer_.forget(*bucket);
  }
}

void Pipeline::recover() { reset(/*drops_gradients=*/in_backward()); }

void Pipeline::reset_iteration() { reset(/*drops_gradients=*/true); }

void Pipeline::reset(bool drops_gradients) try {
  gatherer_.forget_group_shards();
  for (const auto& unit : units_) {
    gatherer_.reshard(*unit);
    unit->entering = kNoCall;
  }
  backward_order_.reset();
  reduction_order_.reset();
  for (const auto& bucket : buckets()) {
    if (drops_gradients) {
      reducer_.discard(*bucket);
    } else {
      reducer_.settle(*bucket);
    }
  }
  state_ = PipelineState::Idle;
  is_second_backward_ = false;
  ledger_.leave_iteration();
  ledger_.enter_phase(Phase::Other);
  forward_order_.reset();
} catch (const Error& error) {
  fail(error);
}

// - Measurements and checks

void Pipeline::begin_times() {
  ledger_.begin_iteration();
  if (ledger_.has_times()) {
    Gatherer::forget_issues(buckets());
  }
}

}  // namespace fsdp
