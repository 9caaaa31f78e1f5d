#include "torch/unit_parameters.h"

#include <torch/csrc/autograd/python_variable.h>

#include "base/check.h"

namespace py = pybind11;

namespace fsdp {

void UnitParameter::set_unsharded(py::object object) {
  unsharded_object = std::move(object);
  if (!unsharded_object.is_none()) {
    unsharded = THPVariable_Unpack(unsharded_object.ptr());
  }
}

UnitParameters::UnitParameters(const UnitLayout& layout, std::vector<UnitParameter> all)
    : layout_(layout), all_(std::move(all)) {
  FSDP_CHECK(all_.size() == layout_.params().size(), "TorchUnit got ", all_.size(),
             " parameters. The layout has ", layout_.params().size(), ".");
  for (std::size_t i = 0; i < layout_.params().size(); ++i) {
    if (layout_.params()[i].trainable) {
      trainable_.push_back(i);
    }
  }
}

void UnitParameters::bind(std::vector<BoundObjects> objects, py::object flat) {
  FSDP_CHECK(objects.size() == all_.size(), "bind got ", objects.size(),
             " parameters. The layout has ", all_.size(), ".");
  for (std::size_t i = 0; i < objects.size(); ++i) {
    auto& [sharded, unsharded, place_gradient] = objects[i];
    all_[i].sharded = std::move(sharded);
    all_[i].set_unsharded(std::move(unsharded));
    all_[i].place_gradient = std::move(place_gradient);
    all_[i].requires_grad = layout_.params()[i].trainable;
  }
  has_flat_ = !flat.is_none();
  flat_ = std::move(flat);
}

// Unpacked anew each time: swap_tensors (module.to()) exchanges the tensor behind the object.
const at::Tensor& UnitParameters::sharded(std::size_t i) const {
  return THPVariable_Unpack(all_[i].sharded.ptr());
}

const at::Tensor& UnitParameters::flat() const { return THPVariable_Unpack(flat_.ptr()); }

const at::Tensor& UnitParameters::gradient_owner(std::size_t i) const {
  return has_flat_ ? flat() : sharded(trainable_[i]);
}

}  // namespace fsdp
