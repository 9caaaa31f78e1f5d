// The units under one root module and the schedule that they share.
//
// Note [parameters frozen for an evaluation]
// Between a forward and its backward, a user may freeze parameters, run an evaluation, and unfreeze
// them. peft does so to run the model without its adapters. Frozen parameters need new units, but
// the pending backward needs the old ones. So while a backward is pending, evaluations run with the
// old units. When that backward begins, it raises if parameters are still frozen. Otherwise each
// unsharded parameter, which autograd has recorded, gets requires_grad of its sharded one again.
// Models with flat parameters get new units at once, because the memory of a flat parameter may
// have changed, too.
//
// Note [turns]
// On a GPU, autograd runs a node whose gradient is on the host on the thread that has called
// backward, and at the same time other nodes on the device's thread. So hooks of one backward may
// run on two threads. They take turns: each hook, each recomputed forward and each method that the
// user calls holds the root's mutex. A thread that holds the mutex may call Python, such as
// extensions, reduce hooks and attached optimizers. So no thread waits for the mutex while it holds
// the GIL. Users' hooks on sharded parameters run without the mutex. Such a hook may run a
// backward, and the hooks of that backward may run on another thread.
//
// Under CPUOffloadPolicy, a loss may use the sharded parameters, which are on the host. Autograd
// adds to their gradients on the caller's thread when a hook has returned, so out of turn. So the
// hook adds the gradient itself, in turn, and gives autograd nothing to add. It leaves that to
// autograd if a user's hook has to run after it, and in a backward with create_graph=True.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/lanes.h"
#include "core/schedule/pipeline.h"
#include "torch/autograd_hooks.h"
#include "torch/root_owner.h"
#include "torch/step_checksum.h"
#include "torch/torch_unit.h"
#include "torch/with_python.h"

namespace fsdp {

class TorchRoot : public std::enable_shared_from_this<TorchRoot> {
 public:
  // `when_stale` is a weak reference to a method of Python's root: calling it returns the method,
  // or None if the root is gone. `replicas` is as in Pipeline. Forward calls that method instead of
  // a unit's pre_forward if needs_new_units(), or if Python has to check the modules. `checks` is
  // null if no step is checked.
  TorchRoot(std::shared_ptr<Lanes> lanes, std::shared_ptr<Lanes> replicas, PipelineOptions options,
            pybind11::object when_stale, std::shared_ptr<StepChecks> checks);
  ~TorchRoot();
  // Frees the pipeline, because another root takes this one's place. A graph may still own this
  // object.
  void retire();

  void add_unit(const std::shared_ptr<TorchUnit>& unit, UnitConfig config);

  Pipeline& pipeline() { return *pipeline_; }
  bool is_retired() const { return pipeline_ == nullptr; }
  Lanes& lanes() { return *lanes_; }
  Lanes* replicas() { return replicas_.get(); }  // null if there are none
  const std::vector<std::shared_ptr<TorchUnit>>& units() const { return units_; }

  // See Note [one thread].
  RootOwner& owner() { return owner_; }
  // See Note [turns]. A thread may hold several at once.
  using Turn = std::unique_lock<std::recursive_mutex>;
  [[nodiscard]] Turn take_turn();
  // Lets other threads in, unless a forward or backward runs.
  void leave_if_idle();

  // Whether this is a forward that activation checkpointing runs again inside backward.
  bool is_recomputing() const;
  // Like is_recomputing, when forward enters `unit`. A backward that begins inside the unit, as
  // with zero-bubble pipelining, may recompute the unit before any hook has run. Then this begins
  // the backward.
  bool enter_recomputation(const TorchUnit& unit);
  // Whether the caller runs in a backward inside the root's, such as that of a region of reentrant
  // checkpointing. Call it while the root's backward runs.
  bool is_in_inner_backward() const;
  // Begins a forward if `unit` is the outermost one. Returns false if the root has to be rebuilt,
  // or Python has to check the modules.
  bool enter_forward(TorchUnit& unit);
  bool is_outermost(const TorchUnit& unit) const { return passes().outermost() == unit.number(); }
  // `output` is the output of the outermost unit. A backward may follow if it is `with_gradient`.
  void leave_forward(pybind11::handle output, bool with_gradient);
  // A forward of `unit` ended in an exception. Modules have their sharded parameters until the next
  // forward, which cleans up.
  void abandon_forward(const TorchUnit& unit);

  // Every backward hook calls this first. `node` is behind the output that backward has reached.
  [[nodiscard]] Turn ensure_backward(const torch::autograd::Node* node = nullptr);
  GraphCalls& graph_calls() { return graph_calls_; }
  // Whether a forward that begins now needs new units, because parameters were frozen, unfrozen or
  // converted.
  bool needs_new_units() const;
  // Python has checked the current modules. `may_train` is false if a trainable parameter is
  // in no unit. Such a model may only be evaluated: the next forward with gradients checks the
  // modules again.
  void accept_module_changes(bool may_train) {
    seen_module_changes_ = module_changes();
    may_train_ = may_train;
  }
  void reset_iteration();
  // Whether a backward has run since the last wait for reductions or finalize_backward.
  bool awaits_finalization() const { return awaits_finalization_; }
  void set_awaits_finalization(bool value) { awaits_finalization_ = value; }
  // Forward raises while a handle of finalize_backward is pending.
  void set_handle_pending(bool value) { is_handle_pending_ = value; }
  // Cleans up if a forward or backward has failed: Pipeline::reset. Warns if gradients of earlier
  // backwards are lost.
  void recover();
  // UnitSet::apply. If the pack scale changes, this also scales what the unit has accumulated.
  void apply(int unit, UnitSettings settings);
  // Reduces the gradients that backwards without gradient sync have accumulated. For callers that
  // do not know before a backward that it is the last.
  void reduce_accumulated();
  void wait_for_reductions();
  // `method` is a weak reference to a method of Python's root. The next backward calls it before it
  // begins. With None, it calls nothing.
  void set_before_backward(pybind11::object method);
  void unshard(int unit);
  // Calls Pipeline::prefetch_next_forward. Cleans up before if a forward or backward has failed.
  void prefetch_next_forward();

  pybind11::object pre_forward_when_stale(pybind11::handle module, pybind11::handle args,
                                          pybind11::handle kwargs);

 private:
  struct BackwardGuard;
  // Whether a parameter was frozen or unfrozen since the units were made. With `accepts_frozen`,
  // frozen parameters that may stay in their units do not count: Note [frozen parameters].
  bool has_gradient_setting_changed(bool accepts_frozen) const;
  void align_gradient_settings();
  void settle_gradient_settings();
  void begin_engine_backward(const torch::autograd::Node* node);
  void begin_backward(bool may_reshard, const BackwardGraph& graph);
  void end_backward();
  void return_from_backward();
  void begin_step();
  void end_step();
  void abandon_backward(std::uint64_t number) noexcept;
  Passes& passes() const { return *passes_; }
  bool reset_failed(Pipeline::After after);

  RootOwner owner_;
  std::recursive_mutex turns_;
  std::shared_ptr<Lanes> lanes_;
  std::shared_ptr<Lanes> replicas_;  // may be null
  std::vector<std::shared_ptr<TorchUnit>> units_;
  std::unique_ptr<Pipeline> pipeline_;  // destroyed before the units, whose memory its work uses
  std::shared_ptr<Passes> passes_;      // of the pipeline, and also once the root has retired
  GraphCalls graph_calls_;
  HeldObject when_stale_;
  HeldObject before_backward_;  // null if there is nothing to call
  std::uint64_t seen_module_changes_ = module_changes();
  bool may_train_ = true;      // with the modules as Python has checked them
  int awaited_backwards_ = 0;  // of forwards that autograd has recorded with these units
  // An evaluation has run while parameters were frozen or unfrozen, and no backward or training
  // forward since: Note [parameters frozen for an evaluation].
  bool had_other_settings_ = false;
  std::shared_ptr<StepChecks> checks_;  // may be null
  bool is_checking_ = false;            // in a checked step
  int backward_task_ = -1;              // autograd's number of the backward that runs
  bool awaits_finalization_ = false;
  bool is_handle_pending_ = false;
};

// Returns views of the packed gradients that backwards without gradient sync have accumulated for a
// unit, between passes. Each has one row for each rank. Side by side, the rows of a rank are its
// segment of the unit's layout. Empty if there are no such gradients.
std::vector<at::Tensor> accumulated_gradients(TorchRoot& root, int unit);

// The calling thread uses the root while this exists: Note [one thread].
class UseOfRoot {
 public:
  explicit UseOfRoot(TorchRoot& root)
      : root_(root), is_first_(root.owner().enter(RootOwner::Use::Call)), turn_(root.take_turn()) {}
  ~UseOfRoot() {
    if (is_first_) {
      root_.leave_if_idle();
    }
  }
  UseOfRoot(const UseOfRoot&) = delete;
  UseOfRoot& operator=(const UseOfRoot&) = delete;

 private:
  TorchRoot& root_;
  bool is_first_;
  TorchRoot::Turn turn_;
};

}  // namespace fsdp
