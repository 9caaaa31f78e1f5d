// The gradients of backwards without gradient sync that a unit shows: Note [shown gradients].
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/check.h"
#include "torch/dtype.h"
#include "torch/torch_unit.h"
#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::atomic<int> units_that_show{0};

}  // namespace

bool any_unit_shows_gradients() { return units_that_show.load(std::memory_order_relaxed) > 0; }

void TorchUnit::set_shows(bool value) {
  if (shows_ != value) {
    shows_ = value;
    units_that_show.fetch_add(value ? 1 : -1, std::memory_order_relaxed);
  }
}

void TorchUnit::show_accumulated(py::object wrap) {
  keeps_gradients_ = true;
  wrap_ = std::move(wrap);
  shown_.resize(gradients_.count());
}

std::vector<TorchUnit::Shown> TorchUnit::shown() const {
  std::vector<Shown> of_trainable;
  for (std::size_t i = 0; keeps_gradients_ && i < trainable_.size(); ++i) {
    of_trainable.push_back(shown_[gradient_place(i)]);
  }
  return of_trainable;
}

void TorchUnit::adopt_shown(std::size_t trainable, Shown shown) {
  set_shows(shows_ || shown.is_shown);
  shown_.at(gradient_place(trainable)) = std::move(shown);
}

// - The gradient of a flat parameter

std::int64_t TorchUnit::accumulated_numel() const {
  if (layout_.world_size() == 1) {
    return THPVariable_Unpack(flat_parameter_.ptr()).numel();
  }
  std::int64_t numel = 0;
  for (const std::size_t parameter : trainable_) {
    numel += parameters_[parameter].unsharded.numel();
  }
  return numel;
}

// On one rank the gradient has the places of the reduced one, and an optimizer can use it.
std::vector<at::Tensor> TorchUnit::parts_of_accumulated(const at::Tensor& flat) const {
  std::vector<at::Tensor> parts;
  std::int64_t next = 0;
  for (const std::size_t parameter : trainable_) {
    const std::int64_t numel = parameters_[parameter].unsharded.numel();
    const ParamSpec& spec = layout_.params()[parameter];
    const std::int64_t first =
        layout_.world_size() > 1
            ? next
            : static_cast<std::int64_t>(layout_.placements()[parameter].flat_gradient_offset /
                                        itemsize(*spec.grad_dtype));
    parts.push_back(flat.narrow(0, first, numel).view(parameters_[parameter].unsharded.sizes()));
    next += numel;
  }
  return parts;
}

// - The end of a backward

void TorchUnit::show_gradients() {
  had_gradients_ = false;
  if (!keeps_gradients_) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (has_flat_) {
    show_flat_gradient();
    return;
  }
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    if (trained(i).has_gradient()) {
      show(i, std::exchange(trained(i).unsharded.mutable_grad(), at::Tensor()));
    }
  }
}

// The first backward after a reduction has made a tensor for each parameter. Later ones have added
// to parts of the flat gradient.
void TorchUnit::show_flat_gradient() {
  const auto found = std::find_if(trainable_.begin(), trainable_.end(),
                                  [this](std::size_t i) { return parameters_[i].has_gradient(); });
  if (found == trainable_.end()) {
    return;
  }
  const at::Tensor& any = parameters_[*found].unsharded.grad();
  at::Tensor flat = std::exchange(accumulated_flat_, at::Tensor());
  if (!flat.defined()) {
    flat = at::zeros({accumulated_numel()}, any.options());
  }
  const std::vector<at::Tensor> parts = parts_of_accumulated(flat);
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    const at::Tensor gradient = std::exchange(trained(i).unsharded.mutable_grad(), at::Tensor());
    if (gradient.defined() && !gradient.is_alias_of(flat)) {
      at::Tensor part = parts[i];
      part.copy_(gradient);
    }
  }
  show(0, std::move(flat));
}

void TorchUnit::show(std::size_t trainable, at::Tensor gradient) {
  at::Tensor& visible = gradient_owner(trainable).mutable_grad();
  at::Tensor reduced = std::exchange(visible, at::Tensor());
  if (is_whole(trainable) && reduced.defined()) {
    const at::Tensor local = has_flat_ ? reduced : local_tensor_of(reduced);
    if (local.scalar_type() == gradient.scalar_type() && local.device() == gradient.device()) {
      gradient.add_(local);
      reduced = at::Tensor();
    }
  }
  shown_[gradient_place(trainable)] = {true, std::move(reduced)};
  set_shows(true);
  visible = is_whole(trainable) && !has_flat_ ? as_sharded(trainable, gradient) : gradient;
}

// Whether the sharded parameter is the whole one, so that an optimizer can use what is shown.
bool TorchUnit::is_whole(std::size_t trainable) const {
  return layout_.world_size() == 1 && !trained(trainable).is_dtensor();
}

at::Tensor TorchUnit::as_sharded(std::size_t trainable, const at::Tensor& gradient) const {
  at::Tensor result;
  with_python([&] {
    const py::object local = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
    const py::object made = wrap_(trainable_[trainable], local);
    result = THPVariable_Unpack(made.ptr());
  });
  return result;
}

// - The beginning of a backward

// All gradients are checked before any is moved, so that nothing is lost if one is refused.
void TorchUnit::take_back_gradients() {
  if (!shows_) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> taken(shown_.size());
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    if (shown_[i].is_shown) {
      taken[i] = shown_gradient(i);
    }
  }
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    const Shown shown = std::exchange(shown_[i], {});
    if (taken[i].defined()) {
      gradient_owner(i).mutable_grad() = shown.put_aside;
      take_back(i, taken[i]);
      had_gradients_ = true;
    }
  }
  set_shows(false);
}

// Returns the gradient that the user has left in .grad, in the dtype in which autograd adds to it.
// It is undefined if there is none, or if the user has set a sharded one.
at::Tensor TorchUnit::shown_gradient(std::size_t trainable) const {
  const std::size_t parameter = trainable_[trainable];
  at::Tensor gradient = gradient_owner(trainable).grad();
  if (!gradient.defined()) {
    return gradient;
  }
  if (!has_flat_ && !parameters_[parameter].is_dtensor() &&
      gradient.key_set().has(c10::DispatchKey::Python)) {
    if (!is_whole(trainable)) {
      return {};
    }
    gradient = local_tensor_of(gradient);
  }
  const std::vector<std::int64_t> shape = has_flat_
                                              ? std::vector<std::int64_t>{accumulated_numel()}
                                              : parameters_[parameter].unsharded.sizes().vec();
  const ParamSpec& spec = layout_.params()[parameter];
  FSDP_CHECK(gradient.sizes() == shape && gradient.device() == device(), "the gradient of ",
             has_flat_ ? "the flat parameter" : "parameter '" + spec.name + "'", " of unit '",
             name_, "' has shape ", gradient.sizes(), " on ", gradient.device(),
             ", but the accumulated gradient has shape ", at::IntArrayRef(shape), " on ", device(),
             ". Set .grad to a tensor of that shape, or to None.");
  gradient = gradient.requires_grad() ? gradient.detach() : gradient;
  return gradient.to(to_scalar_type(spec.unsharded_grad_dtype.value_or(spec.param_dtype)));
}

void TorchUnit::take_back(std::size_t trainable, const at::Tensor& gradient) {
  if (!has_flat_) {
    add_gradient(trainable_[trainable], gradient);
    return;
  }
  const std::vector<at::Tensor> parts = parts_of_accumulated(gradient);
  for (std::size_t i = 0; i < trainable_.size(); ++i) {
    add_gradient(trainable_[i], parts[i]);
  }
  accumulated_flat_ = gradient;
}

// Backward may have brought the parameter's gradient already.
void TorchUnit::add_gradient(std::size_t parameter, at::Tensor gradient) {
  at::Tensor& now = parameters_[parameter].unsharded.mutable_grad();
  if (now.defined()) {
    gradient.add_(now);
  }
  now = std::move(gradient);
}

void TorchUnit::drop_shown() {
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    if (shown_[i].is_shown) {
      gradient_owner(i).mutable_grad() = shown_[i].put_aside;
    }
    shown_[i] = {};
  }
  accumulated_flat_ = at::Tensor();
  had_gradients_ = false;
  set_shows(false);
}

}  // namespace fsdp
