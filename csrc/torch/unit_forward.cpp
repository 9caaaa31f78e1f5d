// Note [transforms]
// watch_inputs puts a node in front of inputs, to learn when the unit's backward has ended. The
// node knows one level of autograd and no tangent. Transforms of torch.func have several levels,
// and forward-mode autograd has tangents. The node would silently lose them, so transforms get no
// node. The unit's gradients are reduced at the end of backward instead.
//
// Note [async inputs]
// An AsyncCollectiveTensor wraps the result of a collective that may still be in flight.
// torch.compile replaces it by the tensor inside. If that tensor requires no gradient, as when the
// AsyncCollectiveTensor is a view, the gradient is lost. Otherwise the gradient bypasses the node
// that watch_inputs puts in front of the input. So a unit waits for such inputs, and its forward
// gets plain tensors with their memory. Autograd refuses to change these in place, as in FSDP2.
// Views of the inputs would allow it, but Dynamo cannot trace plain views of such tensors.
#include "torch/unit_forward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "torch/containers.h"
#include "torch/torch_root.h"
#include "torch/torch_unit.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// The exception that an `except` block around the caller handles, if any.
const PyObject* handled_exception() {
#if PY_VERSION_HEX >= 0x030B0000
  return py::reinterpret_steal<py::object>(PyErr_GetHandledException()).ptr();
#else
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_GetExcInfo(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return value;
#endif
}

// Whether autograd has a node behind the tensor.
bool has_history(const at::Tensor& tensor) { return tensor.requires_grad() && !tensor.is_leaf(); }

// Waits for an AsyncCollectiveTensor that requires a gradient, and returns a plain tensor. Returns
// other tensors as they are. See Note [async inputs].
at::Tensor wait_if_async(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !tensor.key_set().has(c10::DispatchKey::Python)) {
    return tensor;
  }
  const py::object object = py::cast(tensor);
  const py::object async_type = py::module_::import("torch.distributed._functional_collectives")
                                    .attr("AsyncCollectiveTensor");
  if (!py::isinstance(object, async_type)) {
    return tensor;
  }
  const at::NoGradGuard no_gradients;
  return with_history_of(tensor, object.attr("trigger_wait")().cast<at::Tensor>());
}

at::Tensor cast_floating_point(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_floating_point() ? tensor.to(dtype) : tensor;
}

}  // namespace

UnitForward::UnitForward(TorchUnit& unit, ForwardCasts casts, std::size_t module_count)
    : unit_(unit),
      casts_(casts),
      handled_(module_count, nullptr),
      watches_(module_count),
      pending_(module_count, 0) {}

void UnitForward::name_ranges(const std::string& unit) {
  pre_forward_range_ = range_name("pre_forward", unit);
  post_forward_range_ = range_name("post_forward", unit);
}

std::shared_ptr<TorchRoot> UnitForward::living_root() const {
  std::shared_ptr<TorchRoot> root = unit_.root();
  FSDP_CHECK(root != nullptr, "The root module of unit '", unit_.name(),
             "' was deleted. Keep a reference to the model.");
  return root;
}

py::object UnitForward::pre_forward(std::size_t index, py::handle module, py::handle args,
                                    py::handle kwargs) {
  const std::shared_ptr<TorchRoot> root = living_root();
  root->owner().enter(RootOwner::Use::Forward);
  handled_.at(index) = handled_exception();
  const bool recomputing = root->enter_recomputation(unit_);
  if (!recomputing && !root->enter_forward(unit_)) {
    py::object inputs = root->pre_forward_when_stale(module, args, kwargs);
    root->leave_if_idle();  // another root may run the forward
    return inputs;
  }
  const Range range(*root->lanes().device, pre_forward_range_);
  const bool entering = recomputing || enter_module();
  if (entering && !recomputing && at::GradMode::is_enabled() && !is_summoned(*root)) {
    unit_.parameters().check_frozen(unit_.name(), /*enters=*/true);
  }
  const CallId call = enter(*root, recomputing);
  py::object inputs = py::make_tuple(args, kwargs);
  const py::object original = inputs;
  if (!recomputing) {
    moves_inputs_ = !unit_.device().is_cpu() && root->is_outermost(unit_);
  }
  if (moves_inputs_) {
    inputs = to_device(inputs, unit_.device());
  }
  if (!is_summoned(*root)) {
    inputs = prepare_inputs(inputs);
    if (entering) {  // nodes of casts and waits belong to the inputs, not to this call
      first_node_ = next_node_number();
    }
    if (at::GradMode::is_enabled()) {
      watch_inputs(index, inputs, call, entering);
    }
  }
  const py::object changed = inputs.is(original) ? py::object(py::none()) : inputs;
  if (inner_ == nullptr) {
    return changed;
  }
  const py::object inner =
      inner_->pre_forward(index, module, inputs[py::int_(0)], inputs[py::int_(1)]);
  return inner.is_none() ? changed : inner;
}

py::object UnitForward::post_forward(std::size_t index, py::handle output) {
  const std::shared_ptr<TorchRoot> root = living_root();
  if (root->owner().is_of_another_thread()) {
    return py::none();  // pre_forward has raised
  }
  const Range range(*root->lanes().device, post_forward_range_);
  if (handled_exception() != handled_.at(index)) {
    discard_watches(index);
    root->abandon_forward(unit_);
    return py::none();
  }
  try {
    return end_all(*root, index, output);
  } catch (...) {
    discard_watches(index);
    root->abandon_forward(unit_);
    throw;
  }
}

// Forward has ended in an exception.
void UnitForward::discard_watches(std::size_t index) {
  if (inner_ != nullptr) {
    inner_->discard_watches(index);
  }
  watches_.at(index).end();
  watches_.at(index) = {};
}

// Ends the forward of the enclosed units first: Note [units of one module].
py::object UnitForward::end_all(TorchRoot& root, std::size_t index, py::handle returned) {
  if (inner_ == nullptr) {
    watches_.at(index).end();
    return end(root, index, returned);
  }
  const py::object inner = inner_->end_all(root, index, returned);
  watches_.at(index).end();
  const py::handle output = inner.is_none() ? returned : py::handle(inner);
  const py::object outer = end(root, index, output);
  return outer.is_none() ? inner : outer;
}

py::object UnitForward::end(TorchRoot& root, std::size_t index, py::handle returned) {
  const bool recomputing = root.is_recomputing();
  const bool outermost = !recomputing && root.is_outermost(unit_);
  const bool last_of_group = recomputing || leave_module(index) || outermost;
  CallId call = root.pipeline().unit(unit_.number()).entering;
  const bool summoned = is_summoned(root);
  const bool with_gradient = has_graph(returned);
  if (last_of_group) {
    if (with_gradient && !recomputing && !summoned) {
      unit_.parameters().check_frozen(unit_.name(), /*enters=*/false);
    }
    const py::gil_scoped_release no_gil;
    const TorchRoot::Turn turn = root.take_turn();
    call = root.pipeline().post_forward(unit_.number(), with_gradient && !summoned);
  }
  if (summoned) {
    if (outermost) {
      root.leave_forward(returned, with_gradient);
    }
    return py::none();
  }
  GraphCalls* calls = recomputing ? nullptr : &root.graph_calls();
  const py::object output = end_watch(index, returned, call, calls);
  const bool is_watched = with_gradient && watch_outputs(output, call, calls);
  if (!is_watched && last_of_group && !recomputing) {
    keep_for_opaque(root, call, output);
  }
  if (outermost) {
    root.leave_forward(output, with_gradient);
  }
  const py::object result = cast_outputs(output);
  return result.is(returned) ? py::object(py::none()) : result;
}

at::Tensor UnitForward::begin_skip(const at::Tensor& tensor) {
  const std::shared_ptr<TorchRoot> root = unit_.root();
  if (root != nullptr) {
    root->owner().check();
  }
  const bool recomputing = root != nullptr && root->enter_recomputation(unit_);
  FSDP_CHECK(
      root != nullptr && (root->pipeline().passes()->in_forward() || recomputing),
      "join_empty was called on unit '", unit_.name(),
      "' outside of a forward. Call it in the forward of the root module, at the place where "
      "other ranks run the unit.");
  const bool entering = recomputing || enter_module();
  if (entering) {
    first_node_ = next_node_number();
  }
  const CallId call = enter(*root, recomputing);
  // Like the output of a rank that runs the unit, the result needs a gradient if a parameter does.
  const bool has_gradient = tensor.requires_grad() || !unit_.parameters().trainable().empty();
  const at::Tensor skipped = entering && has_gradient && at::GradMode::is_enabled()
                                 ? add_post_backward_node(tensor, kept_unit(), call)
                                 : tensor;
  return inner_ == nullptr ? skipped : inner_->begin_skip(skipped);
}

void UnitForward::end_skip(std::size_t index, const at::Tensor& tensor) {
  if (inner_ != nullptr) {
    inner_->end_skip(index, tensor);
  }
  const std::shared_ptr<TorchRoot> root = unit_.root();
  const bool recomputing = root->is_recomputing();
  const bool last_of_group = recomputing || leave_module(index);
  if (!last_of_group) {
    return;
  }
  CallId call = kNoCall;
  {
    const py::gil_scoped_release no_gil;
    const TorchRoot::Turn turn = root->take_turn();
    call = root->pipeline().post_forward(unit_.number(), at::GradMode::is_enabled());
  }
  if (at::GradMode::is_enabled()) {
    add_pre_backward_hook(tensor, kept_unit(), call, first_node_,
                          recomputing ? nullptr : &root->graph_calls());
  }
}

CallId UnitForward::enter(TorchRoot& root, bool recomputing) {
  const py::gil_scoped_release no_gil;  // it may wait for a gather
  const TorchRoot::Turn turn = root.take_turn();
  if (recomputing && !root.is_in_inner_backward()) {
    root.pipeline().backward().end_regions();
  }
  return root.pipeline().pre_forward(unit_.number());
}

bool UnitForward::is_summoned(TorchRoot& root) const {
  return root.pipeline().unit(unit_.number()).is_summoned;
}

// Returns whether forward enters the unit here. It enters a group of modules with its first one.
bool UnitForward::enter_module() {
  if (pending_count_ > 0) {
    return false;
  }
  std::fill(pending_.begin(), pending_.end(), 1);
  pending_count_ = pending_.size();
  return true;
}

// Returns whether forward leaves the unit here, with the last of its modules.
bool UnitForward::leave_module(std::size_t index) {
  if (pending_.at(index) == 0) {
    return false;
  }
  pending_[index] = 0;
  pending_count_ -= 1;
  return pending_count_ == 0;
}

void UnitForward::end_incomplete(TorchRoot& root, py::handle output) {
  const bool is_incomplete = pending_count_ > 0 && pending_count_ < pending_.size();
  if (is_incomplete && !root.is_outermost(unit_)) {
    const bool summoned = is_summoned(root);
    CallId call = kNoCall;
    {
      const py::gil_scoped_release no_gil;
      call = root.pipeline().post_forward(unit_.number(), at::GradMode::is_enabled() && !summoned);
    }
    if (!summoned && at::GradMode::is_enabled()) {
      (void)watch_outputs(output, call, &root.graph_calls());
    }
  }
  reset_pending();
}

void UnitForward::reset_pending() {
  std::fill(pending_.begin(), pending_.end(), 0);
  pending_count_ = 0;
}

py::object UnitForward::prepare_inputs(py::handle inputs) const {
  return map_tensors(inputs, [&](const at::Tensor& tensor) {
    return wait_if_async(casts_.inputs ? cast_floating_point(tensor, *casts_.inputs) : tensor);
  });
}

py::object UnitForward::cast_outputs(py::handle output) const {
  if (!casts_.outputs) {
    return py::reinterpret_borrow<py::object>(output);
  }
  return map_tensors(output, [&](const at::Tensor& tensor) {
    return cast_floating_point(tensor, *casts_.outputs);
  });
}

// This unit, as a pointer that owns the root, which owns all units.
std::shared_ptr<TorchUnit> UnitForward::kept_unit() {
  std::shared_ptr<TorchRoot> root = unit_.root();
  FSDP_CHECK(root != nullptr, "Unit '", unit_.name(), "' has no root. This is a bug in fsdp_ext.");
  return {std::move(root), &unit_};
}

// See Note [transforms].
void UnitForward::watch_inputs(std::size_t index, py::handle inputs, CallId call, bool entering) {
  std::vector<at::Tensor> watched;
  std::vector<at::Tensor> others;
  bool is_transformed =
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  map_tensors(inputs, [&](const at::Tensor& tensor) {
    if (has_history(tensor) && entering) {
      watched.push_back(tensor);
    } else if (has_history(tensor) || (!tensor.requires_grad() && !tensor.is_inference())) {
      others.push_back(tensor);
    }
    is_transformed = is_transformed || tensor._fw_grad(/*level=*/0).defined();
    return tensor;
  });
  InputWatch& watch = watches_.at(index);
  if (is_transformed || (!entering && !watch.is_empty())) {  // the unit calls itself
    return;
  }
  watch.end();  // of a forward that was interrupted
  watch = InputWatch(watched, std::move(others), kept_unit(), call);
}

// Returns what the caller gets in place of the output.
py::object UnitForward::end_watch(std::size_t index, py::handle output, CallId call,
                                  GraphCalls* calls) {
  const InputWatch watch = std::exchange(watches_.at(index), {});
  if (watch.is_empty() || !at::GradMode::is_enabled()) {
    return py::reinterpret_borrow<py::object>(output);
  }
  for (const at::Tensor& tensor : watch.changed()) {
    add_pre_backward_hook(tensor, kept_unit(), call, first_node_, calls);
  }
  return map_tensors(output, [&](const at::Tensor& tensor) { return watch.output_for(tensor); });
}

// Whether a backward may follow. Forward may enable gradients itself although its caller has not.
bool UnitForward::has_graph(py::handle output) const {
  bool found = at::GradMode::is_enabled();
  if (!found) {
    map_tensors(output, [&](const at::Tensor& tensor) {
      found = found || (has_history(tensor) && tensor.grad_fn()->sequence_nr() >= first_node_);
      return tensor;
    });
  }
  return found;
}

bool UnitForward::watch_outputs(py::handle output, CallId call, GraphCalls* calls) {
  bool found = false;
  map_tensors(output, [&](const at::Tensor& tensor) {
    found = found || has_history(tensor);
    add_pre_backward_hook(tensor, kept_unit(), call, first_node_, calls);
    return tensor;
  });
  return found;
}

// See Note [opaque outputs].
void UnitForward::keep_for_opaque(TorchRoot& root, CallId call, py::handle output) {
  if (!at::GradMode::is_enabled() || unit_.parameters().trainable().empty()) {
    return;
  }
  const std::string type = opaque_type_in(output);
  if (type.empty()) {
    return;
  }
  {
    const py::gil_scoped_release no_gil;
    root.pipeline().unshard(unit_.number(), call);
    root.pipeline().wait_for_unshard(unit_.number());
  }
  if (has_warned_) {
    return;
  }
  has_warned_ = true;
  const std::string message =
      "unit '" + unit_.name() + "' returned a " + type +
      ", and fsdp_ext cannot see tensors inside it. The unit's parameters stay unsharded until "
      "backward has ended, which takes memory. Return tensors in tuples, lists, dicts or "
      "dataclasses to avoid that.";
  if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace fsdp
