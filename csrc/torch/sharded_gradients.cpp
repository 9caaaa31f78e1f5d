#include "torch/sharded_gradients.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "base/check.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// A plain tensor, the gradient of a flat parameter, wraps no other tensor.
py::object local_tensor(py::handle gradient) {
  return py::getattr(gradient, "_local_tensor", gradient);
}

}  // namespace

void ShardedGradients::bind(py::object make, std::size_t count, bool is_of_flat_parameter) {
  make_ = std::move(make);
  count_ = count;
  is_of_flat_parameter_ = is_of_flat_parameter;
  this->make();
  std::size_t bytes = 0;
  for (const Gradient& gradient : gradients_) {
    bytes += THPVariable_Unpack(gradient.local.ptr()).nbytes();
  }
  has_padding_ = bytes < flat_.flat().nbytes();
  clear_padding();
}

const at::Tensor& ShardedGradients::Gradient::rows() const {
  return THPVariable_Unpack(local.ptr());
}

std::size_t ShardedGradients::Gradient::references() const {
  return tensor.use_count() + static_cast<std::size_t>(Py_REFCNT(object.ptr())) +
         rows().use_count() + static_cast<std::size_t>(Py_REFCNT(local.ptr()));
}

std::uint64_t ShardedGradients::next_version() {
  static std::uint64_t versions = 0;  // whoever makes or releases gradients has the GIL
  return ++versions;
}

// The references are counted last, when the list and the parts are gone.
void ShardedGradients::make() {
  release();
  {
    const py::list made = make_(flat_.flat());
    FSDP_CHECK(made.size() == count_, "A unit got ", made.size(), " sharded gradients. It has ",
               count_, " parameters with a gradient.");
    for (const py::handle gradient : made) {
      gradients_.push_back({THPVariable_Unpack(gradient.ptr()),
                            py::reinterpret_borrow<py::object>(gradient), local_tensor(gradient)});
    }
  }
  {
    std::vector<at::Tensor> parts;
    for (const Gradient& gradient : gradients_) {
      parts.push_back(THPVariable_Unpack(gradient.local.ptr()));
    }
    flat_ = FlatTensor(flat_.flat(), parts);
  }
  for (Gradient& gradient : gradients_) {
    gradient.own_references = gradient.references();
    gradient.own_references_of_storage = gradient.rows().storage().use_count();
  }
}

bool ShardedGradients::is_held(std::size_t i) const {
  const Gradient& gradient = gradients_[i];
  return gradient.references() > gradient.own_references ||
         gradient.rows().storage().use_count() > gradient.own_references_of_storage;
}

void ShardedGradients::renew(std::shared_ptr<void> memory) {
  const py::gil_scoped_acquire gil;
  if (is_shared_) {
    flat_.move(std::move(memory));
  } else {
    flat_ = FlatTensor(FlatTensor::like(flat_.flat(), std::move(memory)), {});
    clear_padding();
  }
  if (!is_shared_ || gradients_.empty()) {
    make();
  }
}

void ShardedGradients::move(std::shared_ptr<void> memory) {
  if (flat_.data() != nullptr) {
    flat_.move(std::move(memory));
  } else {
    set_memory(std::move(memory));
  }
}

void ShardedGradients::set_memory(std::shared_ptr<void> memory) {
  flat_.set_memory(std::move(memory));
  if (flat_.data() != nullptr) {
    clear_padding();
  }
}

void ShardedGradients::import(std::size_t i, at::Tensor& shown) {
  const py::gil_scoped_acquire gil;
  const at::NoGradGuard no_grad;
  const Gradient& own = gradients_[i];
  py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(shown));
  py::object local = local_tensor(object);
  Gradient theirs{std::exchange(shown, own.tensor), std::move(object), std::move(local)};
  own.local.attr("copy_")(theirs.local);
  const bool is_made_here = FlatTensor::has_storage_of(theirs.rows());
  if (!is_made_here || theirs.references() > own.own_references) {
    imports_.emplace_back(i, std::move(theirs.tensor));
  }
}

void ShardedGradients::copy_to(const at::Tensor& gradient, std::size_t i) const {
  const py::gil_scoped_acquire gil;
  const at::NoGradGuard no_grad;
  local_tensor(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)))
      .attr("copy_")(gradients_[i].local);
}

// See Note [flat parameters].
void ShardedGradients::clear_padding() {
  if (has_padding_ || is_of_flat_parameter_) {
    const at::NoGradGuard no_grad;
    flat_.flat().zero_();
  }
}

at::Tensor ShardedGradients::share() {
  is_shared_ = true;
  return flat_.flat();
}

}  // namespace fsdp
