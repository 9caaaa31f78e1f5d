// The order in which forward runs the units.
//
// Every forward records the units that it enters, and the next forward prefetches in that order.
// Backward prefetches in the reverse order of its own forward's calls. The first iteration also
// records where forward enters and leaves each unit: buckets are formed from that
// (core/merging.h).
#pragma once

#include <cstddef>
#include <vector>

#include "core/merging.h"

namespace fsdp {

class ForwardOrder {
 public:
  static constexpr int kNoUnit = -1;

  void begin_forward();
  void end_forward();
  // Forward enters the unit.
  void enter(int unit);
  // Forward leaves the unit. Returns the number of this forward call.
  int leave(int unit);
  void end_backward() { calls_are_stale_ = true; }
  // Forgets the iteration that runs, after an exception.
  void reset();

  // Whether the forward calls belong to a backward that has ended, or are too many to keep.
  bool has_stale_calls() const;
  void forget_calls();

  // The unit that is `ahead` places behind the next one in the recorded order, or kNoUnit.
  int upcoming(std::size_t ahead) const;
  // The unit whose call is 1 + `ahead` places before `forward_call` in the same forward, or
  // kNoUnit. Backward runs these units next.
  int preceding(int forward_call, std::size_t ahead) const;

  // The first iteration is recorded until its backward ends, or until a forward enters an outermost
  // unit for the second time.
  bool is_recorded() const { return is_recorded_; }
  bool has_entered(int unit) const;
  void finish_recording() { is_recorded_ = true; }
  const std::vector<ForwardEvent>& first_events() const { return first_events_; }

 private:
  struct ForwardCall {
    int unit;
    int first;  // the first call of the same forward of the root
  };

  std::vector<int> last_order_;     // units in the order that the last whole forward entered them
  std::vector<int> current_order_;  // the same of the forward that runs
  std::size_t next_ = 0;            // in last_order_, behind the unit that runs
  std::vector<ForwardCall> calls_;  // in the order of leave, since the last backward
  int first_call_ = 0;              // of the forward that runs
  bool calls_are_stale_ = false;
  std::vector<ForwardEvent> first_events_;
  bool is_recorded_ = false;
};

}  // namespace fsdp
