// The steps of one unit that a backward has not taken: Note [order of backward] in
// core/schedule/backward_order.h.
#pragma once

#include "core/schedule/backward_order.h"

namespace fsdp {

class BackwardProgress {
 public:
  void begin() { *this = {}; }

  void add(BackwardAction action) { count(action, 1); }
  void take(BackwardAction action) { count(action, -1); }
  // The second run of a region has steps of its own.
  void begin_recomputation() {
    recomputations_left_ -= 1;
    passes_left_ += 1;
  }
  void end_recomputation() { gathers_left_ += 1; }

  bool has_gathers() const { return gathers_left_ > 0; }
  bool has_passes() const { return passes_left_ > 0; }
  // Backward has passed all calls of the unit: Note [order of reductions] in
  // core/schedule/backward_schedule.h.
  bool is_complete() const { return recomputations_left_ == 0 && passes_left_ == 0; }

 private:
  void count(BackwardAction action, int change) {
    gathers_left_ += action == BackwardAction::Gather ? change : 0;
    passes_left_ += action == BackwardAction::Pass ? change : 0;
    recomputations_left_ += action == BackwardAction::Recompute ? change : 0;
  }

  int gathers_left_ = 0;
  int passes_left_ = 0;
  int recomputations_left_ = 0;  // whose second run has not begun
};

}  // namespace fsdp
