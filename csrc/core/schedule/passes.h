// Which forward or backward runs, and whether the last one has failed. The pipeline and
// BackwardSchedule change it.
//
// The legal changes of the state:
//
//   begin_forward   Idle, AwaitingBackward -> Forward
//   end_forward     Forward -> AwaitingBackward, or Idle if autograd recorded nothing
//   begin_backward  Idle, AwaitingBackward -> Backward; Forward -> BackwardInForward
//   end_backward    Backward -> Idle; BackwardInForward -> Forward
//   abandon         any -> Idle, after an exception
//
// begin_backward follows Idle if backward runs over a graph for the second time. If forward itself
// runs a backward that fails, and catches the error, it ends in Backward. A pass that an exception
// ends leaves the state as it is, until the next one resets it.
#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp {

class Passes {
 public:
  bool in_forward() const { return state_ == State::Forward || state_ == State::BackwardInForward; }
  bool in_backward() const {
    return state_ == State::Backward || state_ == State::BackwardInForward;
  }
  bool is_between() const { return !in_forward() && !in_backward(); }
  // Whether a backward is to follow the last forward.
  bool awaits_backward() const { return state_ == State::AwaitingBackward; }
  // The outermost unit whose forward runs, or kNone.
  int outermost() const { return outermost_; }
  // Whether the backward that began last has ended in an exception, and none has begun since.
  bool has_failed_backward() const { return in_backward() && backward_failed_; }
  // The same for a forward or backward.
  bool has_failed() const { return (in_forward() && outermost_ == kNone) || has_failed_backward(); }
  // The number of the last forward or backward. A thread of the autograd engine may ask late.
  std::uint64_t number() const { return number_; }

  // The backward of this number has ended in an exception. Returns false, and does nothing, if
  // another pass has begun since. Any thread may call it.
  bool fail_backward(std::uint64_t number) {
    if (number != number_) {
      return false;
    }
    backward_failed_ = true;
    return true;
  }

  // A forward of this outermost unit begins.
  void enter_forward(int outermost) {
    begin();
    outermost_ = outermost;
  }
  // No forward runs any more.
  void leave_forward() { outermost_ = kNone; }
  // The same, and nothing has failed.
  void reset() {
    outermost_ = kNone;
    backward_failed_ = false;
  }

  static constexpr int kNone = -1;

 private:
  friend class Pipeline;
  friend class BackwardSchedule;

  enum class State : std::uint8_t {
    Idle,
    Forward,
    AwaitingBackward,
    Backward,
    BackwardInForward,  // forward itself runs a backward, for a gradient penalty say
  };

  void begin() {
    number_ += 1;
    backward_failed_ = false;
  }
  void begin_forward() { state_ = State::Forward; }
  void begin_backward() {
    begin();
    is_ahead_ = false;  // backward continues the iteration, and the next forward begins a new one
    state_ = in_forward() ? State::BackwardInForward : State::Backward;
  }
  void end_forward(bool with_gradient) {
    outermost_ = kNone;
    state_ = in_backward()   ? State::Backward
             : with_gradient ? State::AwaitingBackward
                             : State::Idle;
  }
  void end_backward() { state_ = in_forward() ? State::Forward : State::Idle; }
  void abandon() {
    state_ = State::Idle;
    is_ahead_ = false;
  }

  State state_ = State::Idle;
  bool is_ahead_ = false;  // Note [gathers ahead of forward] in core/schedule/pipeline.h
  std::atomic<int> outermost_ = kNone;
  std::atomic<bool> backward_failed_ = false;
  std::atomic<std::uint64_t> number_ = 0;
};

}  // namespace fsdp
