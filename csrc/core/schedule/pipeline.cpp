#include "core/schedule/pipeline.h"

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
      units_(lanes, options_, forward_order_, backward_order_, gatherer_, reducer_, order_check_,
             exchange_),
      exchange_(lanes, replicas, options_.has_peers, options_.mesh_ranks),
      order_check_(lanes, exchange_),
      announcer_(options_, passes_, order_check_, ledger_),
      gatherer_(device_, *lanes.packer, lanes.gather, ledger_, announcer_),
      reducer_(device_, *lanes.packer, lanes.reduce,
               replicas == nullptr ? nullptr : &replicas->reduce, ledger_, announcer_),
      reduction_order_(units_.all(), reducer_) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "The prefetch depth is ", options_.prefetch_depth,
             ". It must be 0 or more.");
}

// - Forward

CallId Pipeline::begin_forward(int outermost, bool with_gradient) try {
  if (!passes_.is_between()) {
    reset(After::Failure);  // the last pass ended in an exception
  }
  if (passes_.outermost() != outermost) {  // TorchRoot has entered it already, with the GIL
    passes_.enter_forward(outermost);
  }
  if (!passes_.awaits_backward() || ledger_.is_full() || !ledger_.has_times()) {
    begin_times();
  }
  ledger_.enter_phase(Phase::Forward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Forward, kAllUnits);
  for (const auto& unit : units_.all()) {
    unit->entering = kNoCall;  // of a forward that ended in an exception
  }
  shards_have_changed_ = gatherer_.reshard_outdated(units_.all()) || shards_have_changed_;
  if (!forward_order_.is_recorded() && forward_order_.has_entered(outermost)) {
    finish_recording();
  }
  if (device_.is_capturing() || gatherer_.has_been_captured()) {
    reshard_for_capture();
  } else if (is_ahead_ && units_.is_stale()) {
    drop_prefetched();  // the update below may change buckets and memory, so no slot may be in use
  }
  units_.update();
  if (with_gradient) {
    lend_gradients();
  }
  // What was not gathered ahead may have changed since.
  gatherer_.begin_iteration(/*goes_on=*/std::exchange(is_ahead_, false));
  forward_order_.begin_forward(/*forgets_all=*/std::exchange(shards_have_changed_, false));
  forward_keeps_ = with_gradient;
  passes_.begin_forward();
  return forward_order_.first_call();
} catch (const Error& error) {
  fail(error);
}

// A captured graph has to contain all gathers of its step. Its replays write slots and shards
// without a new version, so later forwards gather all units anew.
void Pipeline::reshard_for_capture() {
  for (const auto& unit : units_.all()) {
    if (!unit->is_summoned) {
      gatherer_.reshard(*unit);
    }
  }
  is_ahead_ = false;
}

// A captured CUDA graph writes gradients to fixed addresses, so they have to keep their memory.
void Pipeline::lend_gradients() {
  if (!gatherer_.has_been_captured()) {
    reducer_.lend_gradients(units_.buckets());
  }
}

void Pipeline::end_forward(bool with_gradient) try {
  passes_.end_forward(with_gradient);
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  order_check_.end_forward();
  forward_order_.end_forward();
  drop_prefetched();
  gatherer_.end_keeping();
  if (!with_gradient && passes_.is_between()) {
    end_evaluation();
  }
  gatherer_.finish_reading_host();
  gatherer_.join_capture();
} catch (const Error& error) {
  fail(error);
}

// Reshards the units that were prefetched and did not run.
void Pipeline::drop_prefetched() {
  for (const auto& unit : units_.all()) {
    if (unit->gather.is_speculative()) {
      gatherer_.reshard(*unit);
    }
  }
  is_ahead_ = false;
}

// See Note [after an evaluation].
void Pipeline::end_evaluation() {
  for (const auto& unit : units_.all()) {
    if (unit->gather.is_unsharded() && !unit->gather.is_held() &&
        !unit->keeps_slot_after_evaluation) {
      gatherer_.reshard(*unit);
    }
  }
  units_.put_away_parameters();
}

CallId Pipeline::pre_forward(int number) try {
  Unit& unit = this->unit(number);
  if (unit.is_summoned) {
    return passes_.in_backward() ? kNoCall : enter_forward(unit);
  }
  if (passes_.in_backward()) {
    recompute(unit);
  } else {
    if (unit.gather.is_put_away_by_backward()) {
      gatherer_.reshard(unit);
    }
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
  unit.updates.in_forward = unit.updates.count;
  if (unit.entering == kNoCall) {
    unit.entering = forward_order_.enter(unit.number);
  }
  return unit.entering;
}

CallId Pipeline::post_forward(int number, bool with_gradient) try {
  Unit& unit = this->unit(number);
  const CallId call = std::exchange(unit.entering, kNoCall);
  ledger_.close(unit.computing, device_.compute_stream());
  if (!passes_.in_backward()) {
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
    unit.backward.end_recomputation();
  } else {
    unit.entering = call;  // forward runs the unit, and a backward inside runs it again
    return kNoCall;
  }
  return call;
} catch (const Error& error) {
  fail(error);
}

// Returns a function whose calls return the units that forward comes to next, one after the other.
auto Pipeline::next_of_forward() {
  return [this, ahead = std::size_t{0}]() mutable { return forward_order_.upcoming(ahead++); };
}

void Pipeline::prefetch_forward(const Unit& unit) {
  prefetch(unit, unit.forward_prefetch, next_of_forward());
}

// The user's targets, or else the next buckets.
template <typename NextUnit>
void Pipeline::prefetch(const Unit& unit, const std::vector<int>& targets, NextUnit next_unit) {
  for (const int target : targets) {
    Unit& next = this->unit(target);
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
void Pipeline::prefetch_buckets(const Bucket* last, int count, NextUnit next_unit) {
  for (int issued = 0; issued < count;) {
    const int number = next_unit();
    if (number == ForwardOrder::kNoUnit) {
      return;
    }
    Unit& target = this->unit(number);
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

// See Note [gathers ahead of forward].
void Pipeline::prefetch_next_forward() try {
  FSDP_CHECK(passes_.is_between(), "prefetch_next_forward was called while ",
             passes_.in_forward() ? "forward" : "backward",
             " runs. Call it after the optimizer's step.");
  forward_order_.rewind();
  const bool has_order = forward_order_.upcoming(0) != ForwardOrder::kNoUnit;
  if (!has_order || device_.is_capturing() || lanes_.gather.has_been_captured()) {
    return;
  }
  shards_have_changed_ = gatherer_.reshard_outdated(units_.all()) || shards_have_changed_;
  drop_prefetched();  // the gathers of an earlier call
  units_.update();
  gatherer_.begin_iteration();
  is_ahead_ = true;
  prefetch_buckets(nullptr, options_.prefetch_depth + 1, next_of_forward());
} catch (const Error& error) {
  fail(error);
}

// A unit that this pass has left out would keep the bucket's slot. So the slot is released if none
// of the bucket's units are still to come.
void Pipeline::reshard_behind(Unit& unit) {
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

// - Backward

void Pipeline::begin_backward(bool may_reshard, const BackwardGraph& graph) {
  is_ahead_ = false;  // backward continues the iteration, and the next forward begins a new one
  backward_may_reshard_ = may_reshard;
  backward_accumulates_ = graph.accumulates;
  backward_order_.begin(forward_order_.passes(), graph, /*keeps=*/passes_.in_forward());
  lend_gradients();
  reducer_.begin_backward(/*may_lend=*/!gatherer_.has_been_captured());
  reduction_order_.begin_backward(backward_order_.steps());
  passes_.begin_backward();
  ledger_.enter_phase(Phase::Backward);
  pass_ = ledger_.open(device_.compute_stream(), Work::Backward, kAllUnits);
}

void Pipeline::pre_backward(int number, CallId call) try {
  Unit& unit = this->unit(number);
  FSDP_CHECK(unit.update == nullptr || unit.updates.count == unit.updates.in_forward,
             "Backward of unit '", unit.name,
             "' came after its attached optimizer had stepped it, so its gradient would belong to "
             "other weights. Run one backward for each forward, or call step() after backward "
             "instead of attaching the optimizer.");
  if (unit.backward.has_gathers()) {
    take_steps(backward_order_.until_gather(call));
  }
  if (!unit.gather.is_unsharded() || unit.gather.is_put_away()) {  // the call has no step
    gather_in_backward(unit);
  } else {
    gatherer_.note_read(unit);  // another output of the unit may have come on another stream
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::gradient_arrived(int number, std::size_t trainable) try {
  Unit& unit = this->unit(number);
  reducer_.note_arrival(*unit.bucket);
  gatherer_.note_read(unit);  // its backward ran on this stream
  unit.gradients.arrive(trainable);
} catch (const Error& error) {
  fail(error);
}

void Pipeline::end_regions() try {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  while (!steps.empty() && steps.back().action == BackwardAction::Pass &&
         BackwardOrder::is_recomputed_call(steps.back().call) &&
         this->unit(steps.back().unit).entering == kNoCall) {
    take_steps(1);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::post_backward(int number, CallId call) try {
  Unit& unit = this->unit(number);
  if (unit.backward.has_passes()) {
    take_steps(backward_order_.until_pass(call));
  }
  if (!unit.backward.has_passes()) {  // and otherwise if the call has no step
    reshard_in_backward(unit);
  }
} catch (const Error& error) {
  fail(error);
}

// Any call that waits may find that ranks do not answer, or differ.
void Pipeline::fail(const Error& error) try {
  throw_with_flight_record(error, lanes_, replicas_);
} catch (const Error&) {
  abort_after_failure(lanes_, replicas_);
  throw;
}

void Pipeline::take_steps(std::size_t count) {
  for (; count > 0; --count) {
    take(backward_order_.take());
  }
}

void Pipeline::take(const BackwardStep& step) {
  Unit& unit = this->unit(step.unit);
  unit.backward.take(step.action);
  switch (step.action) {
    case BackwardAction::Gather:
      if (backward_accumulates_) {
        unit.gradients.reach(unit.requires_gradient_sync);
      }
      gather_in_backward(unit);
      return;
    case BackwardAction::Pass:
      reduction_order_.advance();
      reshard_in_backward(unit);
      return_to_enclosing();
      return;
    case BackwardAction::Recompute:
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
  reducer_.make_room(*unit.bucket);
  const bool has_waited = !unit.gather.is_sharded() && gatherer_.attach(unit);
  begin_computing(unit, Work::UnitBackward, has_waited);
}

// Backward has passed a unit. Parameters of the unit around it may come next.
void Pipeline::return_to_enclosing() {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  if (!steps.empty() && steps.back().action == BackwardAction::Pass) {
    reducer_.make_room(*this->unit(steps.back().unit).bucket);
  }
}

// Whether a backward runs inside the unit's forward, which may still read the parameters.
bool Pipeline::runs_forward(const Unit& unit) const {
  return passes_.in_forward() && unit.entering != kNoCall;
}

void Pipeline::reshard_in_backward(Unit& unit) {
  ledger_.close(unit.computing, device_.compute_stream());
  const bool is_read_again = is_second_backward_ && !unit.reshard_after_forward;
  if (unit.reshard_after_backward && backward_may_reshard_ && !is_read_again &&
      !runs_forward(unit)) {
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
                           this->unit(steps[next].unit).unshards_in_backward;
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
    unit.backward.begin_recomputation();
  }
  const bool is_new = !unit.gather.is_unsharded();
  gatherer_.unshard(unit, /*on_demand=*/true);
  if (is_new) {
    prefetch_backward(unit);
  }
}

void Pipeline::end_backward() try {
  take_steps(backward_order_.steps().size());
  reduction_order_.end_backward();
  exchange_.begin(units_.all());
  for (auto position = units_.all().rbegin(); position != units_.all().rend(); ++position) {
    Unit& unit = **position;
    ledger_.close(unit.computing, device_.compute_stream());
    if (runs_forward(unit)) {
      continue;
    }
    if ((unit.reshard_after_backward && backward_may_reshard_) || unit.gather.is_speculative()) {
      gatherer_.reshard(unit);
    } else if (unit.reshard_after_backward && !passes_.in_forward()) {
      unit.gather.put_away(unit.port, /*by_backward=*/true);
    }
  }
  gatherer_.invalidate_group_shards();  // another backward may follow an optimizer's step
  exchange_.end(units_.all());  // before a wait for a reduction that not all ranks have issued
  reducer_.end_updates(units_.all());
  const bool may_be_replayed = device_.is_capturing() || lanes_.gather.has_been_captured();
  if (options_.is_last_backward || may_be_replayed) {
    reducer_.wait(units_.buckets());
  }
  if (!gatherer_.keeps_inputs()) {
    gatherer_.finish_reading_host();  // backward has cast shards, too: Note [gather inputs]
  }
  ledger_.close(pass_, device_.compute_stream());
  ledger_.enter_phase(Phase::Other);
  gatherer_.join_capture();
  if (may_be_replayed) {
    exchange_.join(device_.compute_stream());
  }
  passes_.end_backward();
  is_second_backward_ = !backward_may_reshard_;
  order_check_.end_backward();
  if (!forward_order_.is_recorded()) {
    finish_recording();
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_for_reductions() try {
  reducer_.wait(units_.buckets());
} catch (const Error& error) {
  fail(error);
}

void Pipeline::update_buckets() try { units_.update(); } catch (const Error& error) {
  fail(error);
}

void Pipeline::finish_recording() {
  forward_order_.finish_recording();
  units_.invalidate_partition();
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

void Pipeline::unshard(int number, CallId expected) try {
  if (expected != kNoCall) {
    forward_order_.expect(expected);
  }
  if (passes_.is_between()) {
    units_.update();
  }
  Unit& unit = this->unit(number);
  if (unit.gather.is_put_away()) {
    gatherer_.reshard(unit);  // its users may have changed the shards since
  }
  if (passes_.is_between() && unit.gather.is_sharded()) {
    gatherer_.begin_iteration();  // the shards may have changed since the last one
  }
  gatherer_.unshard(unit, /*on_demand=*/true);
  hold(unit);
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_for_unshard(int number) try {
  Unit& unit = this->unit(number);
  if (unit.gather.state() == UnitState::Gathering) {
    gatherer_.attach(unit);
    hold(unit);
  } else {
    gatherer_.note_read(unit);
  }
  if (passes_.is_between()) {
    gatherer_.finish_reading_host();
  }
} catch (const Error& error) {
  fail(error);
}

// See Note [after an evaluation].
void Pipeline::hold(Unit& unit) {
  if (unit.gather.is_unsharded()) {
    unit.gather.hold(/*by_user=*/passes_.is_between());
  }
}

void Pipeline::reshard(int number) try {
  Unit& unit = this->unit(number);
  gatherer_.reshard(unit);
  if (unit.bucket != nullptr && passes_.is_between()) {
    gatherer_.reshard_speculative(*unit.bucket);
    gatherer_.finish_reading_host();  // of a gather that nothing has waited for
  }
} catch (const Error& error) {
  fail(error);
}

// - Passes that fail

bool Pipeline::reset(After what) try {
  const bool is_backward = passes_.in_backward();
  const bool drops_gradients = is_backward || what == After::Anything;
  const bool loses_gradients = is_backward && reducer_.has_accumulated_before(units_.buckets());
  if (what != After::FailureInForward) {
    passes_.reset();
  }
  gatherer_.invalidate_group_shards();
  for (const auto& unit : units_.all()) {
    gatherer_.reshard(*unit);
    unit->entering = kNoCall;
  }
  backward_order_.reset();
  reduction_order_.reset();
  for (const auto& bucket : units_.buckets()) {
    if (drops_gradients) {
      reducer_.discard(*bucket);
    } else {
      reducer_.settle(*bucket);
    }
  }
  passes_.abandon();
  is_ahead_ = false;
  is_second_backward_ = false;
  ledger_.leave_iteration();
  ledger_.enter_phase(Phase::Other);
  forward_order_.reset();
  return loses_gradients;
} catch (const Error& error) {
  fail(error);
}

// - Measurements and checks

void Pipeline::begin_times() {
  ledger_.begin_iteration();
  if (ledger_.has_times()) {
    Gatherer::reset_issues(units_.buckets());
  }
}

}  // namespace fsdp
