// A unit's module hooks: how forward enters and leaves its modules.
//
// Note [opaque outputs]
// Backward gathers a unit when it reaches a tensor that the unit's forward returned. A hook cannot
// see tensors inside a generator, or inside an object of a user's class, so nothing would gather
// the unit. Such a unit stays unsharded until backward has ended. A generator even runs its module
// after the hook, when the parameters would be sharded.
//
// Note [units of one module]
// The parameters of one fully_shard call may lie on several meshes. Each mesh then has its own
// unit, and these units share the modules. The first unit encloses the second, and so on. The
// modules have the hooks of the first unit only. So forward, backward and the schedule treat these
// units as units of nested modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/schedule/forward_order.h"
#include "torch/autograd_hooks.h"

namespace fsdp {

class TorchRoot;
class TorchUnit;

// The dtypes to which forward casts floating-point inputs and outputs, if any.
struct ForwardCasts {
  std::optional<at::ScalarType> inputs;
  std::optional<at::ScalarType> outputs;
};

class UnitForward {
 public:
  // This is a member of `unit`.
  UnitForward(TorchUnit& unit, ForwardCasts casts, std::size_t module_count);

  // Names the ranges in profilers' timelines after the unit.
  void name_ranges(const std::string& unit);
  // From now on these hooks run those of `inner`, too: Note [units of one module].
  void enclose(std::shared_ptr<UnitForward> inner) { inner_ = std::move(inner); }

  // `index` is the module's place in the unit. They return None to change nothing. Otherwise
  // pre_forward returns new (args, kwargs), and post_forward a new output. If forward raises, torch
  // calls post_forward while it handles the exception.
  pybind11::object pre_forward(std::size_t index, pybind11::handle module, pybind11::handle args,
                               pybind11::handle kwargs);
  pybind11::object post_forward(std::size_t index, pybind11::handle output);
  // Take part in the unit's collectives without running its module `index`. begin_skip returns an
  // alias of the tensor. Backward joins the reduction when it passes this alias, and sends zeros.
  at::Tensor begin_skip(const at::Tensor& tensor);
  void end_skip(std::size_t index, const at::Tensor& tensor);

  // Ends the unit's forward if the outermost forward, which has returned `output`, has run only
  // some of the unit's modules. Otherwise post_forward of the last module has ended it.
  void end_incomplete(TorchRoot& root, pybind11::handle output);
  // Forgets which of the unit's modules forward has run.
  void reset_pending();

 private:
  std::shared_ptr<TorchRoot> living_root() const;
  pybind11::object end_all(TorchRoot& root, std::size_t index, pybind11::handle returned);
  pybind11::object end(TorchRoot& root, std::size_t index, pybind11::handle returned);
  void discard_watches(std::size_t index);
  CallId enter(TorchRoot& root, bool recomputing);
  bool is_summoned(TorchRoot& root) const;
  bool enter_module();
  bool leave_module(std::size_t index);
  pybind11::object prepare_inputs(pybind11::handle inputs) const;
  pybind11::object cast_outputs(pybind11::handle output) const;
  std::shared_ptr<TorchUnit> kept_unit();
  void watch_inputs(std::size_t index, pybind11::handle inputs, CallId call, bool entering);
  pybind11::object end_watch(std::size_t index, pybind11::handle output, CallId call,
                             GraphCalls* calls);
  bool has_graph(pybind11::handle output) const;
  // Returns whether a tensor in `output` requires a gradient.
  bool watch_outputs(pybind11::handle output, CallId call, GraphCalls* calls);
  void keep_for_opaque(TorchRoot& root, CallId call, pybind11::handle output);

  TorchUnit& unit_;
  const ForwardCasts casts_;
  std::shared_ptr<UnitForward> inner_;  // may be null; it owns its unit
  // The names of ranges in profilers' timelines, as FSDP2's.
  std::string pre_forward_range_;
  std::string post_forward_range_;

  // The exception that was being handled when forward entered each module. Not owned.
  std::vector<const PyObject*> handled_;
  std::vector<InputWatch> watches_;  // of each module whose forward runs
  std::vector<char> pending_;        // modules of a group that forward has not run yet
  std::size_t pending_count_ = 0;
  std::uint64_t first_node_ = 0;  // of the current call: add_pre_backward_hook
  // As in FSDP2, the outermost unit moves a batch from the host to the GPU. Checkpointing may run
  // this unit's forward again, which then moves the same inputs.
  bool moves_inputs_ = false;
  bool has_warned_ = false;  // of an opaque output
};

}  // namespace fsdp
