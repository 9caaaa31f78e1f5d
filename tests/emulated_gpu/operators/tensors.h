// Tensors of the host and of the meta device that stand for tensors of the emulated GPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace emulated_gpu {

// A tensor of the host over the same memory. As with a kernel's pointers, it keeps no memory alive.
at::Tensor host_alias_of(const at::Tensor& tensor);

// A tensor of the same shape without memory.
at::Tensor meta_of(const at::Tensor& tensor);

// Says that the running work uses the tensor's elements.
void note_use(const at::Tensor& tensor, bool is_write);

// A copy that stays on the host.
at::Tensor host_copy_of(const at::Tensor& tensor);

// The value, with change(tensor) in the place of each tensor that is in it.
template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool is_defined = tensor.has_value() && tensor->defined();
      changed.push_back(is_defined ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

template <typename Use>
void for_each_tensor(const c10::IValue& value, const Use& use) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    use(tensor);
    return tensor;
  });
}

}  // namespace emulated_gpu
