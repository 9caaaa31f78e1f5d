// A unit's module hooks: how forward enters and leaves its modules.
//
// Note [transforms]
// watch_inputs puts a node in front of inputs, to learn when the unit's backward has ended. The
// node knows one level of autograd and no tangent. Transforms of torch.func have several levels,
// and forward-mode autograd has tangents. The node would silently lose them, so transforms get no
// node. The unit's gradients are reduced at the end of backward instead.
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

}  // namespace

py::object TorchUnit::pre_forward(std::size_t index, py::handle module, py::handle args,
                                  py::handle kwargs) {
  const std::shared_ptr<TorchRoot> root = root_.lock();
  FSDP_CHECK(root != nullptr, "The root module of unit '", name_,
             "' was deleted. Keep a reference to the model.");
  root->owner().enter(RootOwner::Use::Forward);
  handled_.at(index) = handled_exception();
  const bool recomputing = root->is_recomputing();
  if (!recomputing && !root->enter_forward(*this)) {
    py::object inputs = root->pre_forward_when_stale(module, args, kwargs);
    root->leave_if_idle();  // another root may run the forward
    return inputs;
  }
  const Range range(*root->lanes().device, ranges_.pre_forward);
  const bool entering = recomputing || enter_module();
  CallId call = kNoCall;
  {
    const py::gil_scoped_release no_gil;  // it may wait for a gather
    call = root->pipeline().pre_forward(number_);
  }
  py::object inputs = py::make_tuple(args, kwargs);
  const py::object original = inputs;
  if (!recomputing) {
    moves_inputs_ = !device().is_cpu() && root->is_outermost(*this);
  }
  if (moves_inputs_) {
    inputs = to_device(inputs, device());
  }
  if (!is_summoned(*root)) {
    inputs = cast(inputs, casts_.inputs);
    if (entering) {  // nodes of casts belong to the inputs, not to this call
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

py::object TorchUnit::post_forward(std::size_t index, py::handle output) {
  const std::shared_ptr<TorchRoot> root = root_.lock();
  FSDP_CHECK(root != nullptr, "The root module of unit '", name_,
             "' was deleted. Keep a reference to the model.");
  if (root->owner().is_of_another_thread()) {
    return py::none();  // pre_forward has raised
  }
  const Range range(*root->lanes().device, ranges_.post_forward);
  if (handled_exception() != handled_.at(index)) {
    discard_watches(index);
    root->abandon_forward(*this);
    return py::none();
  }
  try {
    return end_forwards(*root, index, output);
  } catch (...) {
    discard_watches(index);
    root->abandon_forward(*this);
    throw;
  }
}

// Forward has ended in an exception.
void TorchUnit::discard_watches(std::size_t index) {
  if (inner_ != nullptr) {
    inner_->discard_watches(index);
  }
  watches_.at(index).end();
  watches_.at(index) = {};
}

// Ends the forward of the enclosed units first: Note [units of one module].
py::object TorchUnit::end_forwards(TorchRoot& root, std::size_t index, py::handle returned) {
  if (inner_ == nullptr) {
    watches_.at(index).end();
    return end_forward(root, index, returned);
  }
  const py::object inner = inner_->end_forwards(root, index, returned);
  watches_.at(index).end();
  const py::handle output = inner.is_none() ? returned : py::handle(inner);
  const py::object outer = end_forward(root, index, output);
  return outer.is_none() ? inner : outer;
}

py::object TorchUnit::end_forward(TorchRoot& root, std::size_t index, py::handle returned) {
  const bool recomputing = root.is_recomputing();
  const bool outermost = !recomputing && root.is_outermost(*this);
  const bool last_of_group = recomputing || leave_module(index) || outermost;
  CallId call = root.pipeline().unit(number_).entering;
  const bool summoned = is_summoned(root);
  if (last_of_group) {
    const py::gil_scoped_release no_gil;
    call = root.pipeline().post_forward(number_, at::GradMode::is_enabled() && !summoned);
  }
  if (summoned) {
    if (outermost) {
      root.leave_forward(returned);
    }
    return py::none();
  }
  GraphCalls* calls = recomputing ? nullptr : &root.graph_calls();
  const py::object output = end_watch(index, returned, call, calls);
  if (!watch_outputs(output, call, calls) && last_of_group && !recomputing) {
    keep_for_opaque(root, call, output);
  }
  if (outermost) {
    root.leave_forward(output);
  }
  const py::object result = cast(output, casts_.outputs);
  return result.is(returned) ? py::object(py::none()) : result;
}

at::Tensor TorchUnit::begin_skip(const at::Tensor& tensor) {
  const std::shared_ptr<TorchRoot> root = root_.lock();
  if (root != nullptr) {
    root->owner().check();
  }
  FSDP_CHECK(
      root != nullptr && (root->pipeline().passes()->in_forward() || root->is_recomputing()),
      "join_empty was called on unit '", name_,
      "' outside of a forward. Call it in the forward of the root module, at the place where "
      "other ranks run the unit.");
  const bool entering = root->is_recomputing() || enter_module();
  if (entering) {
    first_node_ = next_node_number();
  }
  CallId call = kNoCall;
  {
    const py::gil_scoped_release no_gil;
    call = root->pipeline().pre_forward(number_);
  }
  // Like the output of a rank that runs the unit, the result needs a gradient if a parameter does.
  const bool has_gradient = tensor.requires_grad() || !parameters_.trainable().empty();
  const at::Tensor skipped = entering && has_gradient && at::GradMode::is_enabled()
                                 ? add_post_backward_node(tensor, kept_unit(), call)
                                 : tensor;
  return inner_ == nullptr ? skipped : inner_->begin_skip(skipped);
}

void TorchUnit::end_skip(std::size_t index, const at::Tensor& tensor) {
  if (inner_ != nullptr) {
    inner_->end_skip(index, tensor);
  }
  const std::shared_ptr<TorchRoot> root = root_.lock();
  const bool recomputing = root->is_recomputing();
  const bool last_of_group = recomputing || leave_module(index);
  if (!last_of_group) {
    return;
  }
  CallId call = kNoCall;
  {
    const py::gil_scoped_release no_gil;
    call = root->pipeline().post_forward(number_, at::GradMode::is_enabled());
  }
  if (at::GradMode::is_enabled()) {
    add_pre_backward_hook(tensor, kept_unit(), call, first_node_,
                          recomputing ? nullptr : &root->graph_calls());
  }
}

bool TorchUnit::is_summoned(TorchRoot& root) const {
  return root.pipeline().unit(number_).is_summoned;
}

// Returns whether forward enters the unit here. It enters a group of modules with its first one.
bool TorchUnit::enter_module() {
  if (pending_count_ > 0) {
    return false;
  }
  std::fill(pending_.begin(), pending_.end(), 1);
  pending_count_ = pending_.size();
  return true;
}

// Returns whether forward leaves the unit here, with the last of its modules.
bool TorchUnit::leave_module(std::size_t index) {
  if (pending_.at(index) == 0) {
    return false;
  }
  pending_[index] = 0;
  pending_count_ -= 1;
  return pending_count_ == 0;
}

void TorchUnit::end_incomplete_forward(TorchRoot& root, py::handle output) {
  const bool is_incomplete = pending_count_ > 0 && pending_count_ < pending_.size();
  if (is_incomplete && !root.is_outermost(*this)) {
    const bool summoned = is_summoned(root);
    CallId call = kNoCall;
    {
      const py::gil_scoped_release no_gil;
      call = root.pipeline().post_forward(number_, at::GradMode::is_enabled() && !summoned);
    }
    if (!summoned) {
      (void)watch_outputs(output, call, &root.graph_calls());
    }
  }
  reset_pending();
}

void TorchUnit::reset_pending() {
  std::fill(pending_.begin(), pending_.end(), 0);
  pending_count_ = 0;
}

py::object TorchUnit::cast(py::handle object, std::optional<at::ScalarType> dtype) const {
  if (!dtype) {
    return py::reinterpret_borrow<py::object>(object);
  }
  return map_tensors(object, [&](const at::Tensor& tensor) {
    return tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
  });
}

// This unit, as a pointer that owns the root, which owns all units.
std::shared_ptr<TorchUnit> TorchUnit::kept_unit() {
  std::shared_ptr<TorchRoot> root = root_.lock();
  FSDP_CHECK(root != nullptr, "Unit '", name_, "' has no root. This is a bug in fsdp_ext.");
  return {std::move(root), this};
}

// See Note [transforms].
void TorchUnit::watch_inputs(std::size_t index, py::handle inputs, CallId call, bool entering) {
  std::vector<at::Tensor> watched;
  std::vector<at::Tensor> others;
  bool is_transformed =
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  map_tensors(inputs, [&](const at::Tensor& tensor) {
    const bool has_history = tensor.requires_grad() && !tensor.is_leaf();
    if (has_history && entering) {
      watched.push_back(tensor);
    } else if (has_history || (!tensor.requires_grad() && !tensor.is_inference())) {
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
py::object TorchUnit::end_watch(std::size_t index, py::handle output, CallId call,
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

bool TorchUnit::watch_outputs(py::handle output, CallId call, GraphCalls* calls) {
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  bool found = false;
  map_tensors(output, [&](const at::Tensor& tensor) {
    found = found || (tensor.requires_grad() && !tensor.is_leaf());
    add_pre_backward_hook(tensor, kept_unit(), call, first_node_, calls);
    return tensor;
  });
  return found;
}

// See Note [opaque outputs].
void TorchUnit::keep_for_opaque(TorchRoot& root, CallId call, py::handle output) {
  if (!at::GradMode::is_enabled() || parameters_.trainable().empty()) {
    return;
  }
  const std::string type = opaque_type_in(output);
  if (type.empty()) {
    return;
  }
  {
    const py::gil_scoped_release no_gil;
    root.pipeline().unshard(number_, call);
    root.pipeline().wait_for_unshard(number_);
  }
  if (has_warned_) {
    return;
  }
  has_warned_ = true;
  const std::string message =
      "unit '" + name_ + "' returned a " + type +
      ", and fsdp_ext cannot see tensors inside it. The unit's parameters stay unsharded until "
      "backward has ended, which takes memory. Return tensors in tuples, lists, dicts or "
      "dataclasses to avoid that.";
  if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace fsdp
