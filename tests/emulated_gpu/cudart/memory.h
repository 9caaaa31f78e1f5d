// Device memory and pinned memory, both of which are memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace emulated_gpu {

constexpr int kPinned = -1;    // in place of a device
constexpr int kPoison = 0xff;  // a byte that makes NaN in every format

struct Region {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;

  bool is_pinned() const { return device == kPinned; }
};

// The allocation that the address is in, if it is one of CUDA's.
std::optional<Region> region_of(const void* address);

}  // namespace emulated_gpu
