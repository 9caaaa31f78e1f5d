// The floating element types, and how each is widened to fp32 and rounded from it. Everything that
// computes with elements uses these functions, on the host and on GPUs.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif

// GPUs of compute capability 8.0 and newer convert with one instruction, which PyTorch's own CUDA
// casts use, too. It may give another NaN than the arithmetic below; all other results are equal.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FSDP_CONVERTS_IN_HARDWARE 1
#else
#define FSDP_CONVERTS_IN_HARDWARE 0
#endif

namespace fsdp::element {

// Half-precision elements, stored as their bits. Separate structs keep the two types apart.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

template <typename To, typename From>
FSDP_HOST_DEVICE inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

FSDP_HOST_DEVICE inline float widen(BFloat16 value) {
  return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// The conversions below choose with masks, since a loop with branches does not vectorise. The masks
// are signed integers because SSE2 cannot compare unsigned ones.
FSDP_HOST_DEVICE inline std::int32_t mask(bool condition) {
  return -static_cast<std::int32_t>(condition);
}

FSDP_HOST_DEVICE inline std::int32_t choose(bool condition, std::int32_t yes, std::int32_t no) {
  return (yes & mask(condition)) | (no & ~mask(condition));
}

// Moves exponent and mantissa to their places in fp32, and then corrects the exponent's bias. Inf
// and NaN need twice the correction. Subnormals get one more, which adds a leading one that is then
// subtracted. No intermediate value is an fp32 subnormal, so a mode that flushes those to zero
// changes nothing.
FSDP_HOST_DEVICE inline float widen(Float16 value) {
#if FSDP_CONVERTS_IN_HARDWARE
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const std::int32_t sign = static_cast<std::int32_t>((value.bits & 0x8000u) << 16);
  const std::int32_t magnitude = value.bits & 0x7fff;
  const std::int32_t subnormal = mask(magnitude < 0x0400);
  const std::int32_t special = mask(magnitude >= 0x7c00);
  const std::int32_t bits =
      (magnitude << 13) + 0x38000000 + (special & 0x38000000) + (subnormal & 0x00800000);
  const float result = bit_cast<float>(bits) - bit_cast<float>(subnormal & 0x38800000);
  return bit_cast<float>(sign | bit_cast<std::int32_t>(result));
#endif
}

FSDP_HOST_DEVICE inline float widen(float value) { return value; }
FSDP_HOST_DEVICE inline double widen(double value) { return value; }

template <typename T>
FSDP_HOST_DEVICE inline T narrow(float value);

template <>
FSDP_HOST_DEVICE inline float narrow<float>(float value) {
  return value;
}

// Rounds to nearest even, to a bf16 in the upper half. The lower half has no meaning. Every NaN
// becomes 0x7fc0, as in PyTorch's scalar code.
FSDP_HOST_DEVICE inline std::uint32_t round_to_upper_half(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? 0x7fc00000u : rounded;
}

template <>
FSDP_HOST_DEVICE inline BFloat16 narrow<BFloat16>(float value) {
#if FSDP_CONVERTS_IN_HARDWARE
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  return {static_cast<std::uint16_t>(round_to_upper_half(value) >> 16)};
#endif
}

// Rounds to nearest even. Computes the result for every range and chooses one. Normal results are
// rounded in integers, also those that become infinite. Subnormal results are rounded by adding a
// float with the same unit in the last place. A NaN becomes quiet and keeps the high bits of its
// payload, as with the processors' own conversions.
template <>
FSDP_HOST_DEVICE inline Float16 narrow<Float16>(float value) {
#if FSDP_CONVERTS_IN_HARDWARE
  Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const auto bits = bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::int32_t>((bits >> 16) & 0x8000u);
  const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
  const std::int32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const float shifted = bit_cast<float>(magnitude) + 0.5f;
  const std::int32_t subnormal = bit_cast<std::int32_t>(shifted) - 0x3f000000;
  const std::int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x1ff);
  std::int32_t result = choose(magnitude < 0x38800000, subnormal, normal);
  result = choose(magnitude >= 0x47800000, 0x7c00, result);
  result = choose(magnitude > 0x7f800000, nan, result);
  return {static_cast<std::uint16_t>(sign | result)};
#endif
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
// PyTorch also casts through fp32.
template <>
FSDP_HOST_DEVICE inline BFloat16 narrow<BFloat16>(double value) {
  return narrow<BFloat16>(static_cast<float>(value));
}
template <>
FSDP_HOST_DEVICE inline Float16 narrow<Float16>(double value) {
  return narrow<Float16>(static_cast<float>(value));
}

}  // namespace fsdp::element
