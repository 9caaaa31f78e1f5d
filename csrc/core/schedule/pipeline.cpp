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
      units_(lanes, options_, forward_order_, gatherer_, reducer_, order_check_, exchange_),
      exchange_(lanes, replicas, options_.has_peers, options_.mesh_ranks),
      order_check_(lanes, exchange_),
      announcer_(options_, passes_, order_check_, ledger_),
      gatherer_(device_, *lanes.packer, lanes.gather, ledger_, announcer_),
      reducer_(device_, *lanes.packer, lanes.reduce,
               replicas == nullptr ? nullptr : &replicas->reduce, ledger_, announcer_),
      prefetcher_(units_, gatherer_, options_, passes_),
      backward_(lanes, replicas, options_, ledger_, units_, exchange_, order_check_, passes_,
                gatherer_, reducer_, prefetcher_, forward_order_) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "The prefetch depth is ", options_.prefetch_depth,
             ". It must be 0 or more.");
}

// Any call that waits may find that ranks do not answer, or differ.
void Pipeline::fail(const Error& error) { throw_and_abort(error, lanes_, replicas_); }

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
  ledger_.begin_pass(Phase::Forward, Work::Forward);
  for (const auto& unit : units_.all()) {
    unit->entering = kNoCall;  // of a forward that ended in an exception
  }
  shards_have_changed_ = gatherer_.reshard_outdated(units_.all()) || shards_have_changed_;
  if (!forward_order_.is_recorded() && forward_order_.has_entered(outermost)) {
    units_.finish_recording();
  }
  if (device_.is_capturing() || gatherer_.has_been_captured()) {
    reshard_for_capture();
  } else if (passes_.is_ahead_ && units_.is_stale()) {
    drop_prefetched();  // the update below may change buckets and memory, so no slot may be in use
  }
  units_.update();
  if (with_gradient) {
    units_.lend_gradients();
  }
  // What was not gathered ahead may have changed since.
  gatherer_.begin_iteration(/*goes_on=*/std::exchange(passes_.is_ahead_, false));
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
  passes_.is_ahead_ = false;
}

void Pipeline::end_forward(bool with_gradient) try {
  passes_.end_forward(with_gradient);
  ledger_.end_pass();
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
  passes_.is_ahead_ = false;
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

// Returns a function whose calls return the units that forward comes to next, one after the other.
auto Pipeline::next_of_forward() {
  return [this, ahead = std::size_t{0}]() mutable { return forward_order_.upcoming(ahead++); };
}

CallId Pipeline::pre_forward(int number) try {
  Unit& unit = this->unit(number);
  if (unit.is_summoned) {
    return passes_.in_backward() ? kNoCall : enter_forward(unit);
  }
  if (passes_.in_backward()) {
    backward_.recompute(unit);
  } else {
    if (unit.gather.is_put_away_by_backward()) {
      gatherer_.reshard(unit);
    }
    gatherer_.unshard(unit, /*on_demand=*/true);
    enter_forward(unit);
    prefetcher_.prefetch(unit, unit.forward_prefetch, next_of_forward());
  }
  const bool has_waited = gatherer_.attach(unit);
  ledger_.open_unit(unit.computing, Work::UnitForward, unit.number, has_waited);
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
      prefetcher_.reshard_behind(unit);
    }
  } else if (BackwardOrder::is_recomputed_call(call)) {
    backward_.end_recomputation(unit, call);
  } else {
    unit.entering = call;  // forward runs the unit, and a backward inside runs it again
    return kNoCall;
  }
  return call;
} catch (const Error& error) {
  fail(error);
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
  passes_.is_ahead_ = true;
  prefetcher_.prefetch_buckets(nullptr, options_.prefetch_depth + 1, next_of_forward());
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_for_reductions() try {
  reducer_.wait(units_.buckets());
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_before_change(int number) try {
  if (const Bucket* const bucket = unit(number).bucket) {
    reducer_.wait_before_change(*bucket);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::update_buckets() try { units_.update(); } catch (const Error& error) {
  fail(error);
}

void Pipeline::form_buckets() try { units_.form_if_none(); } catch (const Error& error) {
  fail(error);
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
  note_holder(unit);
} catch (const Error& error) {
  fail(error);
}

void Pipeline::wait_for_unshard(int number) try {
  Unit& unit = this->unit(number);
  if (unit.gather.state() == UnitState::Gathering) {
    gatherer_.attach(unit);
    note_holder(unit);
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
void Pipeline::note_holder(Unit& unit) {
  if (unit.gather.is_unsharded()) {
    unit.gather.set_held_by_user(passes_.is_between());
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
  backward_.reset();
  for (const auto& bucket : units_.buckets()) {
    if (drops_gradients) {
      reducer_.discard(*bucket);
    } else {
      reducer_.settle(*bucket);
    }
  }
  passes_.abandon();
  ledger_.leave_iteration();
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
