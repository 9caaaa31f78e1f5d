#include "core/schedule/backward_order.h"

#include <algorithm>

namespace fsdp {
namespace {

constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

bool is_marked(const std::vector<char>& units, int unit) {
  const auto index = static_cast<std::size_t>(unit);
  return index < units.size() && units[index] != 0;
}

void mark(std::vector<char>& units, int unit, bool value) {
  const auto index = static_cast<std::size_t>(unit);
  if (index >= units.size()) {
    units.resize(index + 1, 0);
  }
  units[index] = value ? 1 : 0;
}

bool is_of_first_run(const BackwardStep& step) {
  return step.action == BackwardAction::Recompute || step.action == BackwardAction::Recomputed;
}

// Marks the calls that the graph contains.
void mark_calls(std::vector<ForwardPass>& forwards, const BackwardGraph& graph) {
  for (ForwardPass& forward : forwards) {
    for (ForwardCall& call : forward.calls) {
      call.is_included = graph.is_whole && call.with_gradient;
    }
  }
  auto forward = forwards.begin();
  for (const CallId id : graph.calls) {
    const auto contains = [id](const ForwardPass& pass) {
      return id >= pass.first && id < pass.first + static_cast<CallId>(pass.calls.size());
    };
    if (forward == forwards.end() || !contains(*forward)) {
      forward = std::find_if(forwards.begin(), forwards.end(), contains);
    }
    if (forward != forwards.end()) {
      forward->calls[static_cast<std::size_t>(id - forward->first)].is_included = true;
    }
  }
}

}  // namespace

void BackwardOrder::set_expected(int unit, bool value) { mark(is_expected_, unit, value); }

void BackwardOrder::begin(std::vector<ForwardPass>& forwards, const BackwardGraph& graph,
                          bool keeps) {
  steps_.clear();
  mark_calls(forwards, graph);
  for (ForwardPass& forward : forwards) {
    if (include(forward)) {
      push_steps(forward);
      forward.is_done = forward.is_done || !(keeps || graph.is_kept);
      for (ForwardCall& call : forward.calls) {
        call.is_left_out = call.is_left_out && !graph.accumulates;
      }
    }
  }
}

// Chooses the units of this forward that have steps. Returns false if the graph contains nothing of
// it.
bool BackwardOrder::include(ForwardPass& forward) {
  std::vector<ForwardCall>& calls = forward.calls;
  if (std::none_of(calls.begin(), calls.end(),
                   [](const ForwardCall& call) { return call.is_included; })) {
    return false;
  }
  std::fill(is_included_.begin(), is_included_.end(), 0);
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    const bool asked =
        call->with_gradient && (call->is_expected || is_marked(is_expected_, call->unit));
    if (call->is_included || asked) {
      mark(is_included_, call->unit, true);
      if (call->outer >= 0) {
        calls[static_cast<std::size_t>(call->outer)].is_included = true;
      }
    }
  }
  return true;
}

void BackwardOrder::push_steps(const ForwardPass& forward) {
  for (const CallEvent& event : forward.events) {
    const ForwardCall& call = forward.calls[static_cast<std::size_t>(event.call)];
    const CallId id = forward.first + event.call;
    if (!call.has_left) {
      continue;
    }
    if (!call.with_gradient) {
      if (!event.enters) {
        steps_.push_back({BackwardAction::Recompute, call.unit, id});
      }
    } else if (is_marked(is_included_, call.unit)) {
      steps_.push_back(
          {event.enters ? BackwardAction::Pass : BackwardAction::Gather, call.unit, id});
    }
  }
}

BackwardStep BackwardOrder::take() {
  const BackwardStep step = steps_.back();
  steps_.pop_back();
  return step;
}

std::size_t BackwardOrder::until(const BackwardStep& step) const {
  const auto found =
      std::find_if(steps_.rbegin(), steps_.rend(), [&step](const BackwardStep& other) {
        return other.call == step.call && other.action == step.action;
      });
  return found == steps_.rend() ? 0 : static_cast<std::size_t>(found - steps_.rbegin()) + 1;
}

// - Reentrant checkpointing

std::size_t BackwardOrder::next_step_of(int unit) const {
  for (std::size_t i = steps_.size(); i-- > 0;) {
    if (steps_[i].unit == unit && steps_[i].action != BackwardAction::Recomputed &&
        steps_[i].call < kFirstRecomputed) {
      return i;
    }
  }
  return kNowhere;
}

// If the next step of the unit is Gather or Pass, other checkpointing runs it again.
bool BackwardOrder::is_recomputed(int unit) const {
  const std::size_t next = next_step_of(unit);
  return next != kNowhere && steps_[next].action == BackwardAction::Recompute;
}

// Returns how many steps backward has to take before it recomputes the checkpointed region that
// contains this unit. These steps are of calls that came after the region in forward. Returns 0 if
// backward is recomputing now.
std::size_t BackwardOrder::until_recomputation(int unit) const {
  std::size_t last = next_step_of(unit);
  while (last + 1 < steps_.size() && is_of_first_run(steps_[last + 1])) {
    last += 1;
  }
  return steps_.back().call >= kFirstRecomputed ? 0 : steps_.size() - 1 - last;
}

// A region's calls are recomputed in the order of forward.
CallId BackwardOrder::enter(int unit) {
  std::size_t index = next_step_of(unit);
  for (std::size_t i = index; i-- > 0 && is_of_first_run(steps_[i]);) {
    if (steps_[i].unit == unit && steps_[i].action == BackwardAction::Recompute) {
      index = i;
    }
  }
  steps_[index].action = BackwardAction::Recomputed;
  steps_.push_back({BackwardAction::Pass, unit, next_recomputed_});
  return next_recomputed_++;
}

}  // namespace fsdp
