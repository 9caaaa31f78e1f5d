// Copies for the host's collectives.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fsdp {

// An output of at least this many bytes has left the near caches by the time it is used.
constexpr std::size_t kLargeOutput = std::size_t{4} << 20;

// memcpy with stores that bypass the caches. Ordinary stores first read the destination into the
// cache, which is a third of the memory traffic, and evict what is there. (memcpy itself bypasses
// the caches only for single copies that are larger still.) On other processors than x86 this is
// memcpy.
inline void copy_past_caches(void* destination, const void* source, std::size_t bytes) {
  auto* output = static_cast<char*>(destination);
  const auto* input = static_cast<const char*>(source);
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  const std::size_t before_line =
      (kLine - reinterpret_cast<std::uintptr_t>(output) % kLine) % kLine;
  const std::size_t head = std::min(before_line, bytes);
  std::memcpy(output, input, head);
  output += head;
  input += head;
  bytes -= head;
  for (; bytes >= kLine; output += kLine, input += kLine, bytes -= kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(input);
    auto* to = reinterpret_cast<__m128i*>(output);
    const __m128i line[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1),
                            _mm_loadu_si128(from + 2), _mm_loadu_si128(from + 3)};
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(to + i, line[i]);
    }
  }
  _mm_sfence();  // nothing else orders these stores
#endif
  std::memcpy(output, input, bytes);
}

}  // namespace fsdp
