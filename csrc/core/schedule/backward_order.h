// The order in which backward gathers units and passes them, which is the same on all ranks.
//
// Note [order of backward]
// Autograd calls a hook when backward reaches a unit's output, and another one when it has passed
// the unit's inputs. Which of them run depends on the rank: one rank may leave out an expert,
// detach an output, or have inputs that need no gradient. Collectives that followed the hooks alone
// would differ between ranks. So backward follows forward: each call of a unit has a step Gather
// where forward left it and a step Pass where forward entered it, and backward takes these steps in
// reverse. The steps are a stack, onto which each forward pushes. A hook says how far backward has
// come on this rank, and the pipeline takes all steps up to there. This is right because autograd
// runs operators in the reverse order of forward, so those of all calls behind that place have run.
// At the end of backward the remaining steps are taken.
//
// Steps of calls that no rank needs would cost gathers and reductions. So there are steps only for
// the calls of a unit if
// - autograd's graph contains the output of one of its calls in this forward, or of a call inside,
// - or UnitSettings::reduces_unused is set,
// - or a call's output hides its tensors from hooks.
// A rank that calls join_empty enters and leaves the unit like the others, and its result has the
// same hooks as their outputs. So ranks may differ in which parts of a unit they use. But if they
// differ in whether backward reaches the unit at all, the user has to ask, and a unit without
// trainable parameters must not differ in that. If the graph contains nothing of a forward, that
// forward has no steps, since its backward may come later.
//
// Note [reentrant checkpointing]
// Reentrant checkpointing runs a region of forward without gradients, and once more, with
// gradients, when backward gets there. The calls of the first run have a step Recompute, for
// prefetch. The second run pushes steps of its own, which the backward inside it takes, or
// BackwardSchedule::end_regions.
//
// Other kinds of checkpointing record the calls in forward. They run them again when backward needs
// the first tensor of the region, which gathers the region's units. That has no place in the order:
// if a rank's last unit of a region needs no tensor, the rank gathers the other ones later. So such
// ranks may differ only in regions of one unit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/schedule/forward_order.h"

namespace fsdp {

// Autograd's facts about a backward when it begins.
struct BackwardGraph {
  std::vector<CallId> calls;  // whose outputs are in the graph
  bool is_whole = true;       // the graph contains all calls, and `calls` is empty
  bool accumulates = true;    // gradients go to all parameters, not to chosen tensors
  bool is_kept = false;       // another backward may run over the same graph
};

enum class BackwardAction : std::uint8_t {
  Gather,
  Pass,
  Recompute,
  Recomputed,  // a Recompute whose unit has entered its second run
};

struct BackwardStep {
  BackwardAction action;
  int unit;
  CallId call;
};

// The steps of one unit that a backward has not taken.
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

class BackwardOrder {
 public:
  // Steps of the unit are taken even if the graph does not contain its output.
  void set_expected(int unit, bool value);

  // Makes the steps of a backward. Without `keeps`, marks the forwards that are done after it.
  void begin(std::vector<ForwardPass>& forwards, const BackwardGraph& graph, bool keeps = false);
  void reset() { steps_.clear(); }

  // The next step is the last one.
  const std::vector<BackwardStep>& steps() const { return steps_; }
  BackwardStep take();

  // How many steps to take when a hook says that backward has reached the output of the call, or
  // has passed its inputs. 0 if this step has been taken, or was never there.
  std::size_t until_gather(CallId call) const { return until({BackwardAction::Gather, -1, call}); }
  std::size_t until_pass(CallId call) const { return until({BackwardAction::Pass, -1, call}); }

  // Whether the unit, which enters forward now, is recomputed by reentrant checkpointing.
  bool is_recomputed(int unit) const;
  // Then: how many steps to take before, and the call of the second run, of which the first run's
  // step is marked. Its steps are pushed with enter() and leave().
  std::size_t until_recomputation(int unit) const;
  CallId enter(int unit);
  static bool is_recomputed_call(CallId call) { return call >= kFirstRecomputed; }
  void leave(CallId call, int unit) { steps_.push_back({BackwardAction::Gather, unit, call}); }

 private:
  // More than the ids of calls that forward makes.
  static constexpr CallId kFirstRecomputed = CallId{1} << 62;

  std::size_t until(const BackwardStep& step) const;
  std::size_t next_step_of(int unit) const;
  bool include(ForwardPass& forward);
  void push_steps(const ForwardPass& forward);

  std::vector<BackwardStep> steps_;
  std::vector<char> is_expected_;  // by unit
  std::vector<char> is_included_;  // by unit; used within begin
  CallId next_recomputed_ = kFirstRecomputed;
};

}  // namespace fsdp
