#include "torch/shown_gradients.h"

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

void ShownGradients::set_any(bool value) {
  if (any_ != value) {
    any_ = value;
    units_that_show.fetch_add(value ? 1 : -1, std::memory_order_relaxed);
  }
}

ShownGradients::~ShownGradients() { set_any(false); }

void ShownGradients::enable(py::object wrap) {
  is_enabled_ = true;
  wrap_ = std::move(wrap);
  shown_.resize(parameters_.gradient_count());
}

std::vector<ShownGradients::Shown> ShownGradients::shown() const {
  std::vector<Shown> of_trainable;
  for (std::size_t i = 0; is_enabled_ && i < parameters_.trainable().size(); ++i) {
    of_trainable.push_back(shown_[parameters_.gradient_place(i)]);
  }
  return of_trainable;
}

void ShownGradients::adopt(std::size_t trainable, Shown shown) {
  set_any(any_ || shown.is_shown);
  shown_.at(parameters_.gradient_place(trainable)) = std::move(shown);
}

// - The gradient of a flat parameter

std::int64_t ShownGradients::flat_numel() const {
  if (parameters_.layout().world_size() == 1) {
    return parameters_.flat().numel();
  }
  std::int64_t numel = 0;
  for (const std::size_t parameter : parameters_.trainable()) {
    numel += parameters_[parameter].unsharded.numel();
  }
  return numel;
}

// On one rank the gradient has the layout of the reduced one, and an optimizer can use it.
std::vector<at::Tensor> ShownGradients::parts_of(const at::Tensor& flat) const {
  std::vector<at::Tensor> parts;
  std::int64_t next = 0;
  for (const std::size_t parameter : parameters_.trainable()) {
    const std::int64_t numel = parameters_[parameter].unsharded.numel();
    const ParamSpec& spec = parameters_.layout().params()[parameter];
    const std::int64_t first =
        parameters_.layout().world_size() > 1
            ? next
            : static_cast<std::int64_t>(
                  parameters_.layout().placements()[parameter].flat_gradient_offset /
                  itemsize(*spec.grad_dtype));
    parts.push_back(flat.narrow(0, first, numel).view(parameters_[parameter].unsharded.sizes()));
    next += numel;
  }
  return parts;
}

// - The end of a backward

void ShownGradients::show_all() {
  has_taken_ = false;
  if (!is_enabled_) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (parameters_.has_flat()) {
    show_flat();
    return;
  }
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    if (parameters_.trained(i).has_gradient()) {
      show(i, std::exchange(parameters_.trained(i).unsharded.mutable_grad(), at::Tensor()));
    }
  }
}

// The first backward after a reduction has made a tensor for each parameter. Later ones have added
// to parts of the flat gradient.
void ShownGradients::show_flat() {
  const auto found = std::find_if(parameters_.trainable().begin(), parameters_.trainable().end(),
                                  [this](std::size_t i) { return parameters_[i].has_gradient(); });
  if (found == parameters_.trainable().end()) {
    return;
  }
  const at::Tensor& any = parameters_[*found].unsharded.grad();
  at::Tensor flat = std::exchange(taken_flat_, at::Tensor());
  if (!flat.defined()) {
    flat = at::zeros({flat_numel()}, any.options());
  }
  const std::vector<at::Tensor> parts = parts_of(flat);
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    const at::Tensor gradient =
        std::exchange(parameters_.trained(i).unsharded.mutable_grad(), at::Tensor());
    if (gradient.defined() && !gradient.is_alias_of(flat)) {
      at::Tensor part = parts[i];
      part.copy_(gradient);
    }
  }
  show(0, std::move(flat));
}

void ShownGradients::show(std::size_t trainable, at::Tensor gradient) {
  at::Tensor& visible = parameters_.gradient_owner(trainable).mutable_grad();
  at::Tensor reduced = std::exchange(visible, at::Tensor());
  if (is_whole(trainable) && reduced.defined()) {
    const at::Tensor local = parameters_.has_flat() ? reduced : local_tensor_of(reduced);
    if (local.scalar_type() == gradient.scalar_type() && local.device() == gradient.device()) {
      gradient.add_(local);
      reduced = at::Tensor();
    }
  }
  shown_[parameters_.gradient_place(trainable)] = {true, std::move(reduced)};
  set_any(true);
  visible =
      is_whole(trainable) && !parameters_.has_flat() ? as_sharded(trainable, gradient) : gradient;
}

// Whether the sharded parameter is the whole one, so that an optimizer can use what is shown.
bool ShownGradients::is_whole(std::size_t trainable) const {
  return parameters_.layout().world_size() == 1 && !parameters_.trained(trainable).is_dtensor();
}

at::Tensor ShownGradients::as_sharded(std::size_t trainable, const at::Tensor& gradient) const {
  at::Tensor result;
  with_python([&] {
    const py::object local = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
    const py::object made = wrap_(parameters_.trainable()[trainable], local);
    result = THPVariable_Unpack(made.ptr());
  });
  return result;
}

// - The beginning of a backward

void ShownGradients::check(const std::string& unit) const {
  for (std::size_t i = 0; any_ && i < shown_.size(); ++i) {
    if (shown_[i].is_shown) {
      (void)shown_gradient(i, unit);
    }
  }
}

void ShownGradients::take_back_all(const std::string& unit) {
  if (!any_) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    const Shown shown = std::exchange(shown_[i], {});
    const at::Tensor gradient = shown.is_shown ? shown_gradient(i, unit) : at::Tensor();
    if (gradient.defined()) {
      parameters_.gradient_owner(i).mutable_grad() = shown.put_aside;
      const ParamSpec& spec = parameters_.layout().params()[parameters_.trainable()[i]];
      const DType of_autograd = spec.unsharded_grad_dtype.value_or(spec.param_dtype);
      take_back(i, gradient.to(to_scalar_type(of_autograd)));
      has_taken_ = true;
    }
  }
  set_any(false);
}

// Returns the gradient that the user has left in .grad. It is undefined if there is none, or if the
// user has set a sharded one.
at::Tensor ShownGradients::shown_gradient(std::size_t trainable, const std::string& unit) const {
  const std::size_t parameter = parameters_.trainable()[trainable];
  at::Tensor gradient = parameters_.gradient_owner(trainable).grad();
  if (!gradient.defined()) {
    return gradient;
  }
  if (!parameters_.has_flat() && !parameters_[parameter].is_dtensor() &&
      gradient.key_set().has(c10::DispatchKey::Python)) {
    if (!is_whole(trainable)) {
      return {};
    }
    gradient = local_tensor_of(gradient);
  }
  const std::vector<std::int64_t> shape = parameters_.has_flat()
                                              ? std::vector<std::int64_t>{flat_numel()}
                                              : parameters_[parameter].unsharded.sizes().vec();
  const ParamSpec& spec = parameters_.layout().params()[parameter];
  FSDP_CHECK(gradient.sizes() == shape && gradient.device() == device_, "the gradient of ",
             parameters_.has_flat() ? "the flat parameter" : "parameter '" + spec.name + "'",
             " of unit '", unit, "' has shape ", gradient.sizes(), " on ", gradient.device(),
             ", but the accumulated gradient has shape ", at::IntArrayRef(shape), " on ", device_,
             ". Set .grad to a tensor of that shape, or to None.");
  return gradient.requires_grad() ? gradient.detach() : gradient;
}

void ShownGradients::take_back(std::size_t trainable, const at::Tensor& gradient) {
  if (!parameters_.has_flat()) {
    add_gradient(parameters_.trainable()[trainable], gradient);
    return;
  }
  const std::vector<at::Tensor> parts = parts_of(gradient);
  for (std::size_t i = 0; i < parameters_.trainable().size(); ++i) {
    add_gradient(parameters_.trainable()[i], parts[i]);
  }
  taken_flat_ = gradient;
}

// Backward may have brought the parameter's gradient already.
void ShownGradients::add_gradient(std::size_t parameter, at::Tensor gradient) {
  at::Tensor& now = parameters_[parameter].unsharded.mutable_grad();
  if (now.defined()) {
    gradient.add_(now);
  }
  now = std::move(gradient);
}

void ShownGradients::reset_taken() {
  taken_flat_ = at::Tensor();
  has_taken_ = false;
}

void ShownGradients::discard() {
  for (std::size_t i = 0; i < shown_.size(); ++i) {
    if (shown_[i].is_shown) {
      parameters_.gradient_owner(i).mutable_grad() = shown_[i].put_aside;
    }
    shown_[i] = {};
  }
  reset_taken();
  set_any(false);
}

}  // namespace fsdp
