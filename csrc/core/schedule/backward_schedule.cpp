#include "core/schedule/backward_schedule.h"

#include <algorithm>

#include "base/check.h"
#include "core/record/flight_recorder.h"

namespace fsdp {
namespace {

bool is_complete(const Bucket& bucket) {
  return std::all_of(bucket.units.begin(), bucket.units.end(), [](const Unit* unit) {
    return unit->gradients.count() == 0 || unit->backward.is_complete();
  });
}

// Whether modules have the unit's unsharded parameters.
bool shows_unsharded(const Unit& unit) {
  return unit.gather.is_unsharded() && !unit.gather.is_put_away();
}

bool needs_reduction(const Bucket& bucket) {
  return std::any_of(bucket.units.begin(), bucket.units.end(), [](const Unit* unit) {
    return unit->gradients.needs_reduction(unit->requires_gradient_sync);
  });
}

}  // namespace

// Any call that waits may find that ranks do not answer, or differ.
void BackwardSchedule::fail(const Error& error) { throw_and_abort(error, lanes_, replicas_); }

void BackwardSchedule::begin_backward(bool may_reshard, const BackwardGraph& graph) {
  backward_may_reshard_ = may_reshard;
  backward_accumulates_ = graph.accumulates;
  // Backward takes steps of units that it may not reach, if unused parameters are reduced.
  for (const auto& unit : units_.all()) {
    backward_order_.set_expected(unit->number, unit->reduces_unused && unit->gradients.count() > 0);
  }
  backward_order_.begin(forward_order_.passes(), graph, /*keeps=*/passes_.in_forward());
  if (!graph.accumulates && graph.is_kept) {
    note_left_out();
  }
  units_.lend_gradients();
  reducer_.begin_backward(/*may_lend=*/!gatherer_.has_been_captured());
  order_reductions();
  passes_.begin_backward();
  ledger_.begin_pass(Phase::Backward, Work::Backward);
}

// PyTorch's schedules turn gradient sync off, read the parameters, and then begin a backward.
void BackwardSchedule::note_left_out() {
  for (const BackwardStep& step : backward_order_.steps()) {
    const Unit& unit = units_.at(step.unit);
    if (step.action == BackwardAction::Gather && !unit.requires_gradient_sync &&
        unit.gradients.trains() && !shows_unsharded(unit)) {
      forward_order_.note_left_out(step.call);
    }
  }
}

void BackwardSchedule::pre_backward(int number, CallId call) try {
  Unit& unit = units_.at(number);
  FSDP_CHECK(unit.update == nullptr || unit.updates.count == unit.updates.in_forward,
             "Backward of unit '", unit.name,
             "' came after its attached optimizer had stepped it, so its gradient would belong to "
             "other weights. Run one backward for each forward, or call step() after backward "
             "instead of attaching the optimizer.");
  if (unit.backward.has_gathers()) {
    take_steps(backward_order_.until_gather(call));
  }
  if (!shows_unsharded(unit)) {  // the call has no step
    gather_in_backward(unit);
  } else {
    gatherer_.note_read(unit);  // another output of the unit may have come on another stream
  }
} catch (const Error& error) {
  fail(error);
}

void BackwardSchedule::gradient_arrived(int number, std::size_t trainable) try {
  Unit& unit = units_.at(number);
  reducer_.note_arrival(*unit.bucket);
  gatherer_.note_read(unit);  // its backward ran on this stream
  unit.gradients.arrive(trainable);
} catch (const Error& error) {
  fail(error);
}

void BackwardSchedule::end_regions() try {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  while (!steps.empty() && steps.back().action == BackwardAction::Pass &&
         BackwardOrder::is_recomputed_call(steps.back().call) &&
         units_.at(steps.back().unit).entering == kNoCall) {
    take_steps(1);
  }
} catch (const Error& error) {
  fail(error);
}

void BackwardSchedule::post_backward(int number, CallId call) try {
  Unit& unit = units_.at(number);
  if (unit.backward.has_passes()) {
    take_steps(backward_order_.until_pass(call));
  }
  if (!unit.backward.has_passes()) {  // and otherwise if the call has no step
    reshard_in_backward(unit);
  }
} catch (const Error& error) {
  fail(error);
}

void BackwardSchedule::take_steps(std::size_t count) {
  for (; count > 0; --count) {
    take(backward_order_.take());
  }
}

void BackwardSchedule::take(const BackwardStep& step) {
  Unit& unit = units_.at(step.unit);
  unit.backward.take(step.action);
  switch (step.action) {
    case BackwardAction::Gather:
      if (backward_accumulates_) {
        unit.gradients.reach(unit.requires_gradient_sync);
      }
      gather_in_backward(unit);
      return;
    case BackwardAction::Pass:
      reduce_complete();
      reshard_in_backward(unit);
      return_to_enclosing();
      return;
    case BackwardAction::Recompute:
      reduce_complete();
      return;
    case BackwardAction::Recomputed:
      return;
  }
}

void BackwardSchedule::gather_in_backward(Unit& unit) {
  if (unit.unshards_in_backward) {
    gatherer_.unshard(unit, /*on_demand=*/true);
  }
  prefetch_backward(unit);
  reducer_.make_room(*unit.bucket);
  const bool has_waited = !unit.gather.is_sharded() && gatherer_.attach(unit);
  ledger_.open_unit(unit.computing, Work::UnitBackward, unit.number, has_waited);
}

// Backward has passed a unit. Parameters of the unit around it may come next.
void BackwardSchedule::return_to_enclosing() {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  if (!steps.empty() && steps.back().action == BackwardAction::Pass) {
    reducer_.make_room(*units_.at(steps.back().unit).bucket);
  }
}

// Whether a backward runs inside the unit's forward, which may still read the parameters.
bool BackwardSchedule::runs_forward(const Unit& unit) const {
  return passes_.in_forward() && unit.entering != kNoCall;
}

void BackwardSchedule::reshard_in_backward(Unit& unit) {
  ledger_.close(unit.computing, device_.compute_stream());
  const bool is_read_again = is_second_backward_ && !unit.reshard_after_forward;
  if (unit.reshard_after_backward && backward_may_reshard_ && !is_read_again &&
      !runs_forward(unit)) {
    gatherer_.reshard(unit);
    prefetcher_.reshard_behind(unit);
  }
}

void BackwardSchedule::prefetch_backward(const Unit& unit) {
  const std::vector<BackwardStep>& steps = backward_order_.steps();
  prefetcher_.prefetch(unit, unit.backward_prefetch, [this, &steps, next = steps.size()]() mutable {
    while (next > 0) {
      next -= 1;
      const bool gathers = steps[next].action == BackwardAction::Gather &&
                           units_.at(steps[next].unit).unshards_in_backward;
      if (gathers || steps[next].action == BackwardAction::Recompute) {
        return steps[next].unit;
      }
    }
    return ForwardOrder::kNoUnit;
  });
}

// Forward runs again inside backward.
void BackwardSchedule::recompute(Unit& unit) {
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

void BackwardSchedule::end_recomputation(Unit& unit, CallId call) {
  backward_order_.leave(call, unit.number);
  unit.backward.end_recomputation();
}

void BackwardSchedule::end_backward() try {
  take_steps(backward_order_.steps().size());
  reduce_the_rest();
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
  ledger_.end_pass();
  gatherer_.join_capture();
  if (may_be_replayed) {
    exchange_.join(device_.compute_stream());
  }
  passes_.end_backward();
  is_second_backward_ = !backward_may_reshard_;
  order_check_.end_backward();
  if (!forward_order_.is_recorded()) {
    units_.finish_recording();
  }
} catch (const Error& error) {
  fail(error);
}

void BackwardSchedule::reset() {
  backward_order_.reset();
  awaited_.clear();
  is_second_backward_ = false;
}

// - Reductions

void BackwardSchedule::order_reductions() {
  awaited_.clear();
  for (const auto& unit : units_.all()) {
    unit->backward.begin();
    unit->gradients.begin_backward();
    unit->bucket->is_awaited = false;
  }
  for (const BackwardStep& step : backward_order_.steps()) {
    Unit& unit = units_.at(step.unit);
    unit.backward.add(step.action);
    if (!unit.bucket->is_awaited) {
      unit.bucket->is_awaited = true;
      awaited_.push_back(unit.bucket);
    }
  }
}

void BackwardSchedule::reduce_complete() {
  while (!awaited_.empty() && is_complete(*awaited_.back())) {
    Bucket& bucket = *awaited_.back();
    awaited_.pop_back();
    if (needs_reduction(bucket)) {
      reducer_.pack_and_reduce(bucket);
    }
  }
}

// Only gradients that arrived late, and those of units without steps, are left. The last unit of
// the model comes first.
void BackwardSchedule::reduce_the_rest() {
  reduce_complete();
  awaited_.clear();
  for (auto unit = units_.all().rbegin(); unit != units_.all().rend(); ++unit) {
    if ((*unit)->gradients.has_left_over((*unit)->requires_gradient_sync)) {
      reducer_.pack_and_reduce(*(*unit)->bucket);
    }
  }
}

}  // namespace fsdp
