#include "core/pipeline.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

// Forwards without a backward (evaluation) are forgotten after so many calls. All that is lost is
// what to prefetch in the backward of a forward that old.
constexpr std::size_t kMostForwardCalls = 1 << 14;

}  // namespace

Pipeline::Pipeline(Lanes& lanes, PipelineOptions options)
    : device_(*lanes.device),
      packer_(*lanes.packer),
      options_(options),
      world_size_(lanes.gather.communicator().size()),
      gather_by_(lanes.gather.communicator().gather_by()),
      order_check_(device_, lanes.gather),
      gatherer_(
          device_, *lanes.packer, lanes.gather, ledger_,
          [this](Unit& unit, std::size_t bytes) { announce(Collective::AllGather, unit, bytes); }),
      reducer_(device_, *lanes.packer, lanes.reduce, ledger_,
               [this](Unit& unit, std::size_t bytes) {
                 announce(Collective::ReduceScatter, unit, bytes);
               }) {
  FSDP_CHECK(options_.prefetch_depth >= 0, "prefetch depth expects 0 or more but got ",
             options_.prefetch_depth);
}

int Pipeline::add_unit(UnitConfig config, UnitPort& port) {
  FSDP_CHECK(config.layout.world_size() == world_size_, "unit '", config.name,
             "' expects a layout for ", world_size_, " ranks but got one for ",
             config.layout.world_size());
  const int number = unit_count();
  units_.push_back(std::make_unique<Unit>(number, std::move(config), port, device_, gather_by_));
  Unit& unit = *units_.back();
  packer_.prepare(unit.cast_plan);
  packer_.prepare(unit.gather_plan.unpack);
  packer_.prepare(unit.pack_plan);
  packer_.prepare(unit.finish_plan);
  memory_planned_ = false;
  return number;
}

// - Forward

void Pipeline::begin_forward() {
  if (in_forward_ || in_backward_) {
    reset_iteration();  // the last one ended in an exception
  }
  if (backward_ended_ || forward_calls_.size() > kMostForwardCalls) {
    forward_calls_.clear();
    backward_ended_ = false;
  }
  first_call_ = static_cast<int>(forward_calls_.size());
  if (!memory_planned_) {
    plan_memory();
  }
  gatherer_.begin_iteration();
  in_forward_ = true;
  current_order_.clear();
  next_in_order_ = 0;
  // Units that stayed unsharded since an earlier forward follow shards that have changed.
  for (const auto& unit : units_) {
    unit->followed_version = unit->port.shard_version();
    if (unit->state != UnitState::Sharded && !gatherer_.is_current(*unit)) {
      gatherer_.release(*unit);
    }
  }
}

void Pipeline::end_forward(bool with_gradient) {
  in_forward_ = false;
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
  gatherer_.issue(unit, /*on_demand=*/true, units_);
  if (in_backward_) {
    unit.recomputations += 1;
    prefetch_backward(unit, unit.last_forward_call);
  } else {
    note_forward(unit);
    prefetch_forward(unit);
  }
  gatherer_.attach(unit);
}

int Pipeline::post_forward(int number, bool with_gradient) {
  Unit& unit = unit_at(number);
  if (!in_backward_) {
    unit.last_forward_call = static_cast<int>(forward_calls_.size());
    forward_calls_.push_back({number, first_call_});
    unit.calls_without_gradient += with_gradient ? 0 : 1;
    if (unit.reshard_after_forward) {
      gatherer_.release(unit);
    }
  }
  return unit.last_forward_call;
}

// Follows the recorded order, also where this forward leaves units out or runs them elsewhere.
void Pipeline::note_forward(const Unit& unit) {
  current_order_.push_back(unit.number);
  const auto from = forward_order_.begin() + static_cast<std::ptrdiff_t>(next_in_order_);
  const auto found = std::find(from, forward_order_.end(), unit.number);
  if (found != forward_order_.end()) {
    next_in_order_ = static_cast<std::size_t>(found - forward_order_.begin()) + 1;
  }
}

void Pipeline::prefetch_forward(const Unit& unit) {
  if (!unit.forward_prefetch.empty()) {
    for (const int target : unit.forward_prefetch) {
      gatherer_.issue(unit_at(target), /*on_demand=*/false, units_);
    }
    return;
  }
  const std::size_t end = std::min(
      forward_order_.size(), next_in_order_ + static_cast<std::size_t>(options_.prefetch_depth));
  for (std::size_t i = next_in_order_; i < end; ++i) {
    if (!gatherer_.issue(unit_at(forward_order_[i]), /*on_demand=*/false, units_)) {
      return;  // no slot is free: the next ones would not get one either
    }
  }
}

// - Backward

void Pipeline::begin_backward() { in_backward_ = true; }

void Pipeline::pre_backward(int number, int forward_call) {
  Unit& unit = unit_at(number);
  gatherer_.issue(unit, /*on_demand=*/true, units_);
  prefetch_backward(unit, forward_call);
  gatherer_.attach(unit);
}

void Pipeline::prefetch_backward(const Unit& unit, int forward_call) {
  if (!unit.backward_prefetch.empty()) {
    for (const int target : unit.backward_prefetch) {
      gatherer_.issue(unit_at(target), /*on_demand=*/false, units_);
    }
    return;
  }
  if (forward_call < 0 || forward_call >= static_cast<int>(forward_calls_.size())) {
    return;  // of a forward that is over: backward runs a second time over its graph
  }
  const int first = forward_calls_[static_cast<std::size_t>(forward_call)].first;
  const int end = std::max(first, forward_call - options_.prefetch_depth);
  for (int call = forward_call - 1; call >= end; --call) {
    Unit& target = unit_at(forward_calls_[static_cast<std::size_t>(call)].unit);
    if (!gatherer_.issue(target, /*on_demand=*/false, units_)) {
      return;
    }
  }
}

void Pipeline::gradient_arrived(int number, std::size_t trainable) {
  Unit& unit = unit_at(number);
  if (unit.arrived.at(trainable) != 0) {
    return;  // more of the same gradient, which autograd has added up
  }
  unit.arrived[trainable] = 1;
  unit.arrived_count += 1;
  if (unit.arrived_count == unit.trainable_count() && !awaits_recomputation(unit)) {
    reduce_or_accumulate(unit);
  }
}

void Pipeline::post_backward(int number) {
  Unit& unit = unit_at(number);
  if (unit.arrived_count > 0 && !awaits_recomputation(unit)) {
    reduce_or_accumulate(unit);
  }
  if (unit.reshard_after_backward) {
    gatherer_.release(unit);
  }
}

void Pipeline::end_backward() {
  // In reverse order of registration on every rank, which is about backward's own order.
  for (auto position = units_.rbegin(); position != units_.rend(); ++position) {
    Unit& unit = **position;
    if (unit.arrived_count > 0 || (unit.has_accumulated && unit.requires_gradient_sync)) {
      reduce_or_accumulate(unit);
    }
    if (unit.reshard_after_backward || unit.speculative) {
      gatherer_.release(unit);
    }
    unit.calls_to_recompute = 0;
    unit.recomputations = 0;
  }
  if (is_last_backward_ || device_.is_capturing()) {
    reducer_.wait(units_);
  }
  gatherer_.join_capture();
  in_backward_ = false;
  backward_ended_ = true;
  first_backward_done_ = true;
}

// See Note [reentrant checkpointing].
bool Pipeline::awaits_recomputation(const Unit& unit) const {
  return unit.recomputations < unit.calls_to_recompute;
}

void Pipeline::reduce_or_accumulate(Unit& unit) {
  if (unit.requires_gradient_sync) {
    reducer_.reduce(unit);
  } else {
    reducer_.accumulate(unit);
  }
}

// - By hand

void Pipeline::unshard(int number) {
  if (!memory_planned_) {
    plan_memory();
  }
  Unit& unit = unit_at(number);
  if (!in_forward_ && !in_backward_ && unit.state == UnitState::Sharded) {
    gatherer_.begin_iteration();  // the shards may have changed since the last one
  }
  gatherer_.issue(unit, /*on_demand=*/true, units_);
}

void Pipeline::wait_for_unshard(int number) { gatherer_.attach(unit_at(number)); }

void Pipeline::reshard(int number) { gatherer_.release(unit_at(number)); }

void Pipeline::reset_iteration() {
  for (const auto& unit : units_) {
    gatherer_.release(*unit);
    reducer_.discard(*unit);
    unit->calls_to_recompute = 0;
    unit->calls_without_gradient = 0;
    unit->recomputations = 0;
  }
  in_forward_ = false;
  in_backward_ = false;
  backward_ended_ = false;
  forward_calls_.clear();
  current_order_.clear();
}

// - Settings

void Pipeline::set_reshard_after_forward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_forward != value) {
    unit.reshard_after_forward = value;
    memory_planned_ = false;
  }
}

void Pipeline::set_reshard_after_backward(int number, bool value) {
  unit_at(number).reshard_after_backward = value;
}

void Pipeline::set_requires_gradient_sync(int number, bool value) {
  unit_at(number).requires_gradient_sync = value;
}

void Pipeline::set_gradient_scales(int number, double pack_scale, double reduce_scale) {
  unit_at(number).pack_scale = pack_scale;
  unit_at(number).reduce_scale = reduce_scale;
}

void Pipeline::set_forward_prefetch(int number, std::vector<int> targets) {
  unit_at(number).forward_prefetch = std::move(targets);
  memory_planned_ = false;
}

void Pipeline::set_backward_prefetch(int number, std::vector<int> targets) {
  unit_at(number).backward_prefetch = std::move(targets);
  memory_planned_ = false;
}

// One slot for each unit that can be in use at once, and one for each gather ahead of it.
void Pipeline::plan_memory() {
  std::size_t depth = static_cast<std::size_t>(options_.prefetch_depth);
  for (const auto& unit : units_) {
    depth = std::max({depth, unit->forward_prefetch.size(), unit->backward_prefetch.size()});
    if (unit->reshard_after_forward && unit->state != UnitState::Sharded) {
      return;  // by hand, and it holds a slot: later
    }
  }
  FSDP_CHECK(!device_.is_capturing(),
             "a CUDA graph capture expects all buffers to exist; run a few whole steps before "
             "capturing one");
  gatherer_.plan_memory(units_, options_.nesting + static_cast<int>(depth));
  reducer_.plan_memory(units_);
  memory_planned_ = true;
}

// - Collectives

void Pipeline::announce(Collective op, Unit& unit, std::size_t bytes) {
  if (comparing_ranks()) {
    order_check_.compare(op == Collective::AllGather ? "all-gather" : "reduce-scatter", unit,
                         bytes);
  }
  const Phase phase = in_backward_ ? Phase::Backward : in_forward_ ? Phase::Forward : Phase::Other;
  ledger_.collective(op, phase, unit.number, bytes);
}

// The first forward and the first backward.
bool Pipeline::comparing_ranks() const {
  if (!options_.check_order) {
    return false;
  }
  return in_backward_ ? !first_backward_done_ : !first_forward_done_;
}

}  // namespace fsdp
