#include "reductions.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulated_gpu {
namespace {

struct BFloat16 {
  std::uint16_t bits;

  BFloat16(float value) {
    std::uint32_t word = 0;
    std::memcpy(&word, &value, sizeof(word));
    const std::uint32_t to_even = 0x7fff + (word >> 16 & 1);
    bits = static_cast<std::uint16_t>(value != value ? 0x7fff : (word + to_even) >> 16);
  }
  operator float() const {
    const std::uint32_t word = std::uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};

// The type that elements are combined in.
template <typename T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<_Float16> {
  using Type = float;
};
template <>
struct Wide<BFloat16> {
  using Type = float;
};

template <typename Value>
Value combine(Value one, Value other, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<Value>(one * other);
    case ncclMax:
      return std::max(one, other);
    case ncclMin:
      return std::min(one, other);
    default:
      return static_cast<Value>(one + other);
  }
}

template <typename T>
void reduce_as(void* to, const std::vector<const void*>& from, std::size_t count,
               const Reduction& reduction) {
  using Value = typename Wide<T>::Type;
  const auto element = [&](std::size_t rank, std::size_t i) {
    const auto value = static_cast<Value>(static_cast<const T*>(from[rank])[i]);
    return reduction.scale == 1 ? value : static_cast<Value>(value * reduction.scale);
  };
  for (std::size_t i = 0; i < count; ++i) {
    T sum = static_cast<T>(element(0, i));
    for (std::size_t rank = 1; rank < from.size(); ++rank) {
      sum = static_cast<T>(combine(static_cast<Value>(sum), element(rank, i), reduction.op));
    }
    if (reduction.op == ncclAvg) {
      sum = static_cast<T>(static_cast<Value>(sum) / static_cast<Value>(from.size()));
    }
    static_cast<T*>(to)[i] = sum;
  }
}

// Calls use(a null pointer to the type's C++ type).
template <typename Use>
auto with_type(ncclDataType_t type, const Use& use) {
  switch (type) {
    case ncclInt8:
      return use(static_cast<std::int8_t*>(nullptr));
    case ncclInt32:
      return use(static_cast<std::int32_t*>(nullptr));
    case ncclUint32:
      return use(static_cast<std::uint32_t*>(nullptr));
    case ncclInt64:
      return use(static_cast<std::int64_t*>(nullptr));
    case ncclUint64:
      return use(static_cast<std::uint64_t*>(nullptr));
    case ncclFloat16:
      return use(static_cast<_Float16*>(nullptr));
    case ncclFloat32:
      return use(static_cast<float*>(nullptr));
    case ncclFloat64:
      return use(static_cast<double*>(nullptr));
    case ncclBfloat16:
      return use(static_cast<BFloat16*>(nullptr));
    default:
      return use(static_cast<std::uint8_t*>(nullptr));  // 8-bit floats are only moved
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  return with_type(type, [](auto* none) { return sizeof(*none); });
}

double scalar_of(const void* scalar, ncclDataType_t type) {
  return with_type(type, [scalar](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    return static_cast<double>(static_cast<typename Wide<T>::Type>(*static_cast<const T*>(scalar)));
  });
}

void reduce(void* to, const std::vector<const void*>& from, std::size_t count,
            const Reduction& reduction) {
  with_type(reduction.type, [&](auto* none) {
    reduce_as<std::remove_pointer_t<decltype(none)>>(to, from, count, reduction);
  });
}

}  // namespace emulated_gpu
