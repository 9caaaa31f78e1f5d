#include "core/schedule/forward_order.h"

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

// At most this many forwards and calls may await their backward. The backward of an older forward
// only loses its order and its prefetch.
constexpr std::size_t kMostForwards = 256;
constexpr CallId kMostCalls = 1 << 14;

}  // namespace

void ForwardOrder::begin_forward(bool forgets_all) {
  const CallId oldest = std::max(
      next_call_ - kMostCalls,
      passes_.size() < kMostForwards ? 0 : passes_[passes_.size() - kMostForwards + 1].first);
  const auto is_forgotten = [&](const ForwardPass& pass) {
    return pass.is_done || forgets_all || pass.first < oldest;
  };
  passes_.erase(std::remove_if(passes_.begin(), passes_.end(), is_forgotten), passes_.end());
  ForwardPass& pass = passes_.emplace_back();
  pass.first = next_call_;
  pass.calls.reserve(last_order_.size());  // so that no unit's forward allocates
  pass.events.reserve(2 * last_order_.size());
  open_ = -1;
  current_order_.clear();
  next_ = 0;
}

void ForwardOrder::end_forward() {
  last_order_.swap(current_order_);
  if (passes_.empty()) {
    return;  // reset, because a backward inside this forward has failed
  }
  const auto& calls = passes_.back().calls;
  if (std::none_of(calls.begin(), calls.end(),
                   [](const ForwardCall& call) { return call.with_gradient; })) {
    passes_.pop_back();
  }
}

// Finds the unit in the recorded order even if this forward leaves units out or reorders them.
CallId ForwardOrder::enter(int unit) {
  current_order_.push_back(unit);
  if (!is_recorded_) {
    first_events_.push_back({unit, true});
  }
  const auto from = last_order_.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto found = std::find(from, last_order_.end(), unit);
  if (found != last_order_.end()) {
    next_ = static_cast<std::size_t>(found - last_order_.begin()) + 1;
  }
  ForwardPass& pass = passes_.back();
  const int call = static_cast<int>(pass.calls.size());
  pass.calls.push_back({unit, open_});
  pass.events.push_back({call, true});
  open_ = call;
  next_call_ += 1;
  return pass.first + call;
}

// Calls that an exception has ended inside this one are no longer open.
void ForwardOrder::leave(CallId id, bool with_gradient) {
  ForwardCall* call = find(id);
  if (call == nullptr) {
    return;
  }
  call->has_left = true;
  call->with_gradient = with_gradient;
  passes_.back().events.push_back({static_cast<int>(id - passes_.back().first), false});
  open_ = call->outer;
  if (!is_recorded_) {
    first_events_.push_back({call->unit, false});
  }
}

void ForwardOrder::expect(CallId id) {
  if (ForwardCall* call = find(id)) {
    call->is_expected = true;
  }
}

void ForwardOrder::note_left_out(CallId id) {
  const auto behind =
      std::upper_bound(passes_.begin(), passes_.end(), id,
                       [](CallId call, const ForwardPass& pass) { return call < pass.first; });
  ForwardPass& pass = *(behind - 1);
  pass.calls[static_cast<std::size_t>(id - pass.first)].is_left_out = true;
}

int ForwardOrder::take_left_out() {
  int unit = kNoUnit;
  for (ForwardPass& pass : passes_) {
    for (ForwardCall& call : pass.calls) {
      unit = std::exchange(call.is_left_out, false) ? call.unit : unit;
    }
  }
  return unit;
}

// The calls of the forward that runs.
ForwardCall* ForwardOrder::find(CallId id) {
  if (passes_.empty() || id < passes_.back().first) {
    return nullptr;
  }
  const auto index = static_cast<std::size_t>(id - passes_.back().first);
  return index < passes_.back().calls.size() ? &passes_.back().calls[index] : nullptr;
}

void ForwardOrder::reset() {
  passes_.clear();
  open_ = -1;
  current_order_.clear();
  if (!is_recorded_) {
    first_events_.clear();
  }
}

bool ForwardOrder::awaits_backward_of(int unit) const {
  return std::any_of(passes_.begin(), passes_.end(), [unit](const ForwardPass& pass) {
    return std::any_of(pass.calls.begin(), pass.calls.end(), [unit](const ForwardCall& call) {
      return call.unit == unit && call.with_gradient;
    });
  });
}

int ForwardOrder::upcoming(std::size_t ahead) const {
  const std::size_t index = next_ + ahead;
  return index < last_order_.size() ? last_order_[index] : kNoUnit;
}

bool ForwardOrder::has_entered(int unit) const {
  const ForwardEvent entered{unit, true};
  return std::find(first_events_.begin(), first_events_.end(), entered) != first_events_.end();
}

}  // namespace fsdp
