// The steps of one unit that a backward has not taken: Note [order of backward] in
// core/schedule/backward_order.h.
#pragma once

#include <algorithm>

#include "core/schedule/backward_order.h"

namespace fsdp {

class BackwardProgress {
 public:
  void begin() { *this = {}; }

  void add(BackwardAction action) {
    gathers_left_ += action == BackwardAction::Gather ? 1 : 0;
    passes_left_ += action == BackwardAction::Pass ? 1 : 0;
    recomputations_left_ += action == BackwardAction::Recompute ? 1 : 0;
    is_recomputed_ = recomputations_left_ > 0;
    // All calls that forward recorded count as one source.
    gradient_sources_ = recomputations_left_ + (passes_left_ > 0 ? 1 : 0);
  }
  void take(BackwardAction action) {
    gathers_left_ -= action == BackwardAction::Gather ? 1 : 0;
    passes_left_ -= action == BackwardAction::Pass ? 1 : 0;
    recomputations_left_ -= action == BackwardAction::Recompute ? 1 : 0;
  }
  // The second run of a region has steps of its own.
  void begin_recomputation() {
    recomputations_left_ -= 1;
    passes_left_ += 1;
  }
  void end_recomputation() { gathers_left_ += 1; }

  // A nested backward, of a region of reentrant checkpointing, has produced a gradient. If the
  // regions are inside the unit, each call of the unit has such backwards.
  void note_inner_gradient() {
    if (!is_recomputed_) {
      gradient_sources_ = std::max(gradient_sources_, 2);
    }
  }

  bool has_gathers() const { return gathers_left_ > 0; }
  bool has_passes() const { return passes_left_ > 0; }
  // No gradient arrives any more: Note [order of reductions] in core/schedule/reduction_order.h.
  bool is_complete(bool all_arrived) const {
    const bool has_all = all_arrived && gathers_left_ == 0;
    return recomputations_left_ == 0 && (passes_left_ == 0 || (has_all && gradient_sources_ <= 1));
  }

 private:
  int gathers_left_ = 0;
  int passes_left_ = 0;
  int recomputations_left_ = 0;  // whose second run has not begun
  // The backwards inside backward that bring gradients: Note [reentrant checkpointing].
  int gradient_sources_ = 0;
  bool is_recomputed_ = false;  // as a whole, in a region of reentrant checkpointing
};

}  // namespace fsdp
