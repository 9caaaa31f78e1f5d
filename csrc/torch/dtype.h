// Conversions between PyTorch's dtypes and the core's.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
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

}  // namespace fsdp
