#include "tensors.h"

namespace emulated_gpu {
namespace {

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

at::Tensor as_number_like(at::Tensor made, const at::Tensor& tensor) {
  if (is_wrapped_number(tensor)) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

}  // namespace

at::Tensor host_alias_of(const at::Tensor& tensor) {
  void* data = tensor.numel() != 0 ? tensor.data_ptr() : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return as_number_like(at::from_blob(data, tensor.sizes(), tensor.strides(), options), tensor);
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (is_wrapped_number(tensor)) {
    return tensor;  // kernels for the meta device that are written in Python read the number
  }
  const auto options = tensor.options().device(at::kMeta).pinned_memory(std::nullopt);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

at::Tensor host_copy_of(const at::Tensor& tensor) {
  return as_number_like(tensor.detach().clone(), tensor);
}

}  // namespace emulated_gpu
