// The order in which forward runs the units.
//
// Every forward records the units that it enters, and the next forward prefetches in that order.
// Its calls are kept until their backward has run, since they decide the order of backward
// (core/schedule/backward_order.h). The first iteration also records where forward enters and
// leaves each unit: buckets are formed from that (core/units/merging.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/units/merging.h"

namespace fsdp {

// The number of one call of a unit's forward. It is never used again.
using CallId = std::int64_t;
constexpr CallId kNoCall = -1;

// One call of a unit in a forward.
struct ForwardCall {
  int unit;
  int outer;                   // the place of the call around it in the same forward, or -1
  bool has_left = false;       // otherwise it still runs, or ended in an exception
  bool with_gradient = false;  // autograd recorded it
  bool is_expected = false;    // in backward, even if the graph does not contain its output
  bool is_included = false;    // used within BackwardOrder::begin
  // The unit was sharded when a backward with inputs=, a kept graph and no gradient sync began,
  // which reaches this call. A later backward for all parameters clears this.
  bool is_left_out = false;
};

// Forward enters or leaves the call at a place in ForwardPass::calls.
struct CallEvent {
  int call;
  bool enters;
};

// One forward of the root whose backward may come.
struct ForwardPass {
  CallId first;                    // call i has the id first + i
  std::vector<ForwardCall> calls;  // in the order of enter
  std::vector<CallEvent> events;
  bool is_done = false;  // its backward has run and freed its graph
};

class ForwardOrder {
 public:
  static constexpr int kNoUnit = -1;

  // Forgets the forwards that are done. `forgets_all` forgets the others, too.
  void begin_forward(bool forgets_all = false);
  // Forgets this forward if autograd recorded none of its calls.
  void end_forward();
  // Forward enters the unit. Returns the id of this call.
  CallId enter(int unit);
  void leave(CallId call, bool with_gradient);
  // Backward takes the call's steps even if the graph does not contain its output.
  void expect(CallId call);
  // Sets is_left_out of a call that has steps in this backward.
  void note_left_out(CallId call);
  // Returns a unit that has a left-out call, or kNoUnit, and clears is_left_out of all calls.
  int take_left_out();
  // Forgets the iteration that runs, after an exception.
  void reset();

  // The forwards whose backward may come, in their order.
  std::vector<ForwardPass>& passes() { return passes_; }
  // Whether one of these forwards has a call of the unit that autograd recorded. Forwards that are
  // done count: the first of several backwards over one graph may mark them, if it begins at the
  // output of a unit.
  bool awaits_backward_of(int unit) const;
  // All calls with a smaller id are forgotten.
  CallId first_call() const { return passes_.empty() ? next_call_ : passes_.front().first; }

  // Makes the first recorded unit the next one, as when a forward begins.
  void rewind() { next_ = 0; }
  // The unit that is `ahead` places behind the next one in the recorded order, or kNoUnit.
  int upcoming(std::size_t ahead) const;

  // The first iteration is recorded until its backward ends, or until a forward enters an outermost
  // unit for the second time.
  bool is_recorded() const { return is_recorded_; }
  bool has_entered(int unit) const;
  void finish_recording() { is_recorded_ = true; }
  const std::vector<ForwardEvent>& first_events() const { return first_events_; }

 private:
  ForwardCall* find(CallId call);

  std::vector<int> last_order_;     // units in the order that the last whole forward entered them
  std::vector<int> current_order_;  // the same of the forward that runs
  std::size_t next_ = 0;            // in last_order_, behind the unit that runs
  std::vector<ForwardPass> passes_;
  int open_ = -1;  // the innermost call that runs
  CallId next_call_ = 0;
  std::vector<ForwardEvent> first_events_;
  bool is_recorded_ = false;
};

}  // namespace fsdp
