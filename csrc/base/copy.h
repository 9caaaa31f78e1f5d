// Copies that bypass the host's caches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/instruction_set.h"

namespace fsdp {

// Outputs at least this large leave the near caches before they are read again.
constexpr std::size_t kLargeOutput = std::size_t{4} << 20;

constexpr std::size_t kCacheLine = 64;

// The number of bytes from `address` to the next cache line.
inline std::size_t bytes_to_cache_line(const void* address) {
  return (kCacheLine - reinterpret_cast<std::uintptr_t>(address) % kCacheLine) % kCacheLine;
}

// Copies whole cache lines with non-temporal stores; `destination` begins a cache line. An ordinary
// store first reads the line that it writes, which is a third of a copy's memory traffic, and
// evicts others from the caches. Where there is no SSE2 this is memcpy.
FSDP_ALWAYS_INLINE void stream_cache_lines(void* destination, const void* source,
                                           std::size_t bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<__m128i*>(destination);
  const auto* from = static_cast<const __m128i*>(source);
  for (; bytes >= kCacheLine; to += 4, from += 4, bytes -= kCacheLine) {
    const __m128i line[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1),
                            _mm_loadu_si128(from + 2), _mm_loadu_si128(from + 3)};
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(to + i, line[i]);
    }
  }
#else
  std::memcpy(destination, source, bytes);
#endif
}

// Starts reading cache lines into the caches.
FSDP_ALWAYS_INLINE void prefetch_cache_lines(const void* source, std::size_t bytes) {
#if defined(__GNUC__)
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
    __builtin_prefetch(static_cast<const char*>(source) + at);
  }
#else
  (void)source;
  (void)bytes;
#endif
}

// Orders non-temporal stores before everything that follows. Nothing else orders them.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// memcpy with non-temporal stores. (memcpy itself uses them only for single copies that are even
// larger.)
inline void copy_past_caches(void* destination, const void* source, std::size_t bytes) {
  auto* output = static_cast<char*>(destination);
  const auto* input = static_cast<const char*>(source);
  const std::size_t head = std::min(bytes_to_cache_line(output), bytes);
  std::memcpy(output, input, head);
  const std::size_t lines = (bytes - head) / kCacheLine * kCacheLine;
  stream_cache_lines(output + head, input + head, lines);
  finish_streaming();
  std::memcpy(output + head + lines, input + head + lines, bytes - head - lines);
}

inline void copy(void* destination, const void* source, std::size_t bytes, bool past_caches) {
  if (past_caches) {
    copy_past_caches(destination, source, bytes);
  } else {
    std::memcpy(destination, source, bytes);
  }
}

}  // namespace fsdp
