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

// From this size on of what a collective writes, it is in no near cache any more when it is used.
constexpr std::size_t kLargeOutput = std::size_t{4} << 20;

// memcpy past the caches: what is written is not read into them first, which is a third of the
// memory's traffic, and does not push out what is there. (memcpy itself does so only for single
// copies that are larger still.) Elsewhere than on x86 it is memcpy.
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
  _mm_sfence();  // such stores are ordered by nothing else
#endif
  std::memcpy(output, input, bytes);
}

}  // namespace fsdp
