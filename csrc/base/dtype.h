// The element types of messages. Data that is only moved, and never added or cast, is Bytes (a
// frozen int8 weight, for example).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp {

enum class DType : std::uint8_t { Float32, BFloat16, Float16, Float64, Bytes };

constexpr std::size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return 4;
    case DType::BFloat16:
    case DType::Float16:
      return 2;
    case DType::Float64:
      return 8;
    case DType::Bytes:
      return 1;
  }
  return 0;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return "float32";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Float16:
      return "float16";
    case DType::Float64:
      return "float64";
    case DType::Bytes:
      return "bytes";
  }
  return "unknown";
}

}  // namespace fsdp
