#include "tensors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "emulated_gpu.h"

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

// Elements that are not dense are noted in rows, or as one block if rows are too many.
void note_use(const at::Tensor& tensor, bool is_write) {
  constexpr std::int64_t kMostRows = 1 << 16;
  if (tensor.numel() == 0) {
    return;
  }
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t dense = 1;  // elements that follow each other
  auto outer = dims.begin();
  for (; outer != dims.end() && outer->first <= dense; ++outer) {
    dense += (outer->second - 1) * outer->first;
  }
  std::int64_t rows = 1;
  for (auto dim = outer; dim != dims.end(); ++dim) {
    rows *= dim->second;
  }
  if (rows > kMostRows) {
    for (; outer != dims.end(); ++outer) {
      dense += (outer->second - 1) * outer->first;
    }
    rows = 1;
  }
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t rest = row;
    std::int64_t offset = 0;
    for (auto dim = outer; dim != dims.end(); ++dim) {
      offset += rest % dim->second * dim->first;
      rest /= dim->second;
    }
    (is_write ? writes : reads)(begin + offset * bytes, static_cast<std::size_t>(dense * bytes));
  }
}

at::Tensor host_copy_of(const at::Tensor& tensor) {
  return as_number_like(tensor.detach().clone(), tensor);
}

}  // namespace emulated_gpu
