// Conversions between PyTorch's dtypes and tensors and the core's.
#pragma once

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/dtype.h"

namespace fsdp {

inline constexpr std::array<std::pair<at::ScalarType, DType>, 4> kFloatingDtypes = {{
    {at::kFloat, DType::Float32},
    {at::kBFloat16, DType::BFloat16},
    {at::kHalf, DType::Float16},
    {at::kDouble, DType::Float64},
}};

// Other dtypes are only moved, as bytes.
constexpr DType to_dtype(at::ScalarType type) {
  for (const auto& [theirs, ours] : kFloatingDtypes) {
    if (theirs == type) {
      return ours;
    }
  }
  return DType::Bytes;
}

constexpr at::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [theirs, ours] : kFloatingDtypes) {
    if (ours == dtype) {
      return theirs;
    }
  }
  return at::kByte;
}

// A 1-D tensor over memory of the host, which it does not own.
inline at::Tensor view_of(const void* data, std::size_t numel, DType dtype) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(numel)},
                       at::TensorOptions().dtype(to_scalar_type(dtype)));
}

}  // namespace fsdp
