// A hash of memory, as fast as memory can be read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/mix.h"

namespace fsdp {

// Four hashes, each of every fourth word, so that a multiplication does not wait for the one
// before. mix() maps different values to different results, so a change within one word, such as a
// flipped bit, always changes the hash. Other changes go unnoticed once in 2^64.
inline std::uint64_t hash_bytes(const void* data, std::size_t bytes) {
  constexpr std::size_t kLanes = 4;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const char* next = static_cast<const char*>(data);
  const auto read = [](const char* from, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, count);
    return word;
  };
  std::array<std::uint64_t, kLanes> lanes{1, 2, 3, 4};
  std::size_t left = bytes;
  for (; left >= kLanes * kWord; left -= kLanes * kWord) {
    for (std::uint64_t& lane : lanes) {
      lane = mix(lane, read(next, kWord));
      next += kWord;
    }
  }
  std::uint64_t hash = bytes;
  for (const std::uint64_t lane : lanes) {
    hash = mix(hash, lane);
  }
  for (; left > 0; left -= left < kWord ? left : kWord) {
    hash = mix(hash, read(next, left < kWord ? left : kWord));
    next += kWord;
  }
  return hash;
}

}  // namespace fsdp
