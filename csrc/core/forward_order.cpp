#include "core/forward_order.h"

#include <algorithm>

namespace fsdp {
namespace {

// Forwards without a backward (evaluation) are forgotten after this many calls. The backward of an
// older forward only loses its prefetch.
constexpr std::size_t kMostCalls = 1 << 14;

}  // namespace

void ForwardOrder::begin_forward() {
  first_call_ = static_cast<int>(calls_.size());
  current_order_.clear();
  next_ = 0;
}

void ForwardOrder::end_forward() { last_order_.swap(current_order_); }

// Finds the unit in the recorded order even if this forward leaves units out or reorders them.
void ForwardOrder::enter(int unit) {
  current_order_.push_back(unit);
  if (!is_recorded_) {
    first_events_.push_back({unit, true});
  }
  const auto from = last_order_.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto found = std::find(from, last_order_.end(), unit);
  if (found != last_order_.end()) {
    next_ = static_cast<std::size_t>(found - last_order_.begin()) + 1;
  }
}

int ForwardOrder::leave(int unit) {
  calls_.push_back({unit, first_call_});
  if (!is_recorded_) {
    first_events_.push_back({unit, false});
  }
  return static_cast<int>(calls_.size()) - 1;
}

void ForwardOrder::reset() {
  forget_calls();
  current_order_.clear();
  if (!is_recorded_) {
    first_events_.clear();
  }
}

bool ForwardOrder::has_stale_calls() const {
  return calls_are_stale_ || calls_.size() > kMostCalls;
}

void ForwardOrder::forget_calls() {
  calls_.clear();
  calls_are_stale_ = false;
}

int ForwardOrder::upcoming(std::size_t ahead) const {
  const std::size_t place = next_ + ahead;
  return place < last_order_.size() ? last_order_[place] : kNoUnit;
}

int ForwardOrder::preceding(int forward_call, std::size_t ahead) const {
  if (forward_call < 0 || forward_call >= static_cast<int>(calls_.size())) {
    return kNoUnit;  // backward runs a second time over a graph whose calls are forgotten
  }
  const int call = forward_call - 1 - static_cast<int>(ahead);
  const int first = calls_[static_cast<std::size_t>(forward_call)].first;
  return call >= first ? calls_[static_cast<std::size_t>(call)].unit : kNoUnit;
}

bool ForwardOrder::has_entered(int unit) const {
  const ForwardEvent entered{unit, true};
  return std::find(first_events_.begin(), first_events_.end(), entered) != first_events_.end();
}

}  // namespace fsdp
