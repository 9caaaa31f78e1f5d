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

// From compute capability 8.0 on one instruction converts, with the results of the arithmetic below
// but for which NaN; it is what PyTorch's own CUDA casts use.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FSDP_CONVERTS_IN_HARDWARE 1
#else
#define FSDP_CONVERTS_IN_HARDWARE 0
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

// Choosing with masks, in signed integers, keeps the conversions below free of branches whatever
// the compiler thinks of floating-point exceptions, and SSE2 compares no others.
FSDP_HOST_DEVICE inline std::int32_t mask(bool condition) {
  return -static_cast<std::int32_t>(condition);
}

FSDP_HOST_DEVICE inline std::int32_t choose(bool condition, std::int32_t yes, std::int32_t no) {
  return (yes & mask(condition)) | (no & ~mask(condition));
}

// Exponent and mantissa move to their place in fp32 and the exponent's bias is mended: by the
// double for inf and NaN, and by one more for subnormals, which then lack no leading one but have
// one too many. fp32 subnormals do not come up, so that a mode that flushes them changes nothing.
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

// To nearest even; any NaN becomes the one that PyTorch's scalar code makes of it.
template <>
FSDP_HOST_DEVICE inline BFloat16 narrow<BFloat16>(float value) {
#if FSDP_CONVERTS_IN_HARDWARE
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = static_cast<std::int32_t>(bits & 0x7fffffffu) > 0x7f800000;
  return {static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
#endif
}

// To nearest even, all ranges computed and one chosen. Normal results round in integers, also up
// to infinity; subnormal ones by adding a float whose last place is theirs. A NaN becomes quiet
// and keeps the high bits of its payload, as the processors' own conversions have it.
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

// How many elements of a parameter of `numel` rank `rank` has in its chunk of `chunk_numel`, where
// two ranks' chunks begin `stride` apart.
FSDP_HOST_DEVICE inline std::int64_t elements_of_rank(std::int64_t numel, std::int64_t chunk_numel,
                                                      std::int64_t stride, int rank) {
  const std::int64_t left = numel - stride * rank;
  return left <= 0 ? 0 : (left < chunk_numel ? left : chunk_numel);
}

}  // namespace fsdp::body
