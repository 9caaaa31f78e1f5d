#pragma once

#include <cstddef>

namespace fsdp {

// Rounds `value` up to a multiple of `alignment`.
inline std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace fsdp
