// Memory of devices and memory that is pinned or managed, all of which is memory of the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "shared_file.h"

namespace emulated_gpu {

constexpr int kPinned = -1;    // in place of a device
constexpr int kPoison = 0xff;  // a byte that makes NaN in every format

enum class MemoryKind {
  kDevice,
  kPool,  // of a device's memory pool
  kManaged,
  kPinned,
  kOpened,  // memory of a device that another process has allocated
};

struct Region {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;
  MemoryKind kind;
  SharedRange range;  // of memory that belongs to a device

  bool is_pinned() const { return kind == MemoryKind::kPinned; }
  bool is_managed() const { return kind == MemoryKind::kManaged; }
};

// The allocation that the address is in, if it is one of CUDA's.
std::optional<Region> region_of(const void* address);

// Maps memory that another process has allocated on the device. Returns null if there is none.
void* open_memory(const SharedRange& range, int device);

// Frees memory of the kind. The address is where it begins.
cudaError_t release(void* address, MemoryKind kind);

}  // namespace emulated_gpu
