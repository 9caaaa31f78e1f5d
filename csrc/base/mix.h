// Hashes of several numbers.
#pragma once

#include <cstdint>

namespace fsdp {

// Mixes `value` into `hash`, and returns the result.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

}  // namespace fsdp
