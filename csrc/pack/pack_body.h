// What happens to one element, and which elements a run covers: shared by every implementation
// of pack.h, and written so that a GPU's compiler takes it, too.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif

namespace fsdp::body {

// Half-precision elements by their bits. Plain structs, so that they are types of their own.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

template <typename To, typename From>
FSDP_HOST_DEVICE inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast expects types of one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

FSDP_HOST_DEVICE inline float widen(BFloat16 value) {
  return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// Without branches, so that it vectorises: exponent and mantissa are moved to their place in
// fp32, and the exponent's bias is mended by a multiplication, which is exact, subnormals included.
FSDP_HOST_DEVICE inline float widen(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // inf and NaN
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(scaled) | special);
}

FSDP_HOST_DEVICE inline float widen(float value) { return value; }
FSDP_HOST_DEVICE inline double widen(double value) { return value; }

template <typename T>
FSDP_HOST_DEVICE inline T narrow(float value);

template <>
FSDP_HOST_DEVICE inline float narrow<float>(float value) {
  return value;
}

// To nearest even; any NaN becomes PyTorch's.
template <>
FSDP_HOST_DEVICE inline BFloat16 narrow<BFloat16>(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

// To nearest even, all three ranges computed and one chosen. Normal results round in integers;
// subnormal ones by adding a float whose last place is theirs.
template <>
FSDP_HOST_DEVICE inline Float16 narrow<Float16>(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const float shifted = bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // rounds to infinity
  result = magnitude > 0x7f800000u ? 0x7e00u : result;   // NaN
  return {static_cast<std::uint16_t>(sign | result)};
}

template <typename T>
FSDP_HOST_DEVICE inline T narrow(double value);

template <>
FSDP_HOST_DEVICE inline double narrow<double>(double value) {
  return value;
}
template <>
FSDP_HOST_DEVICE inline float narrow<float>(double value) {
  return static_cast<float>(value);
}
// By way of fp32, as PyTorch casts.
template <>
FSDP_HOST_DEVICE inline BFloat16 narrow<BFloat16>(double value) {
  return narrow<BFloat16>(static_cast<float>(value));
}
template <>
FSDP_HOST_DEVICE inline Float16 narrow<Float16>(double value) {
  return narrow<Float16>(static_cast<float>(value));
}

// The type that arithmetic between two element types runs in.
template <typename A, typename B>
using Wide =
    std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

template <typename Destination, typename Source>
FSDP_HOST_DEVICE inline Destination convert(Source source, Wide<Source, Destination> scale) {
  using W = Wide<Source, Destination>;
  return narrow<Destination>(static_cast<W>(widen(source)) * scale);
}

template <typename Destination, typename Source>
FSDP_HOST_DEVICE inline Destination convert_and_add(Destination before, Source source,
                                                    Wide<Source, Destination> scale) {
  using W = Wide<Destination, Destination>;
  const Destination rounded = convert<Destination>(source, scale);
  return narrow<Destination>(static_cast<W>(widen(before)) + static_cast<W>(widen(rounded)));
}

// How many elements of a parameter of `numel` rank `rank` has in its chunk of `chunk_numel`.
FSDP_HOST_DEVICE inline std::int64_t elements_of_rank(std::int64_t numel, std::int64_t chunk_numel,
                                                      int rank) {
  const std::int64_t left = numel - chunk_numel * rank;
  return left <= 0 ? 0 : (left < chunk_numel ? left : chunk_numel);
}

}  // namespace fsdp::body
