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
  kRegistered,  // pinned memory that CUDA has not allocated
  kOpened,      // memory of a device that another process has allocated
  kMapped,      // of cuMemMap: each device needs access to it
};

struct Region {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;
  MemoryKind kind;
  SharedRange range;          // of memory that belongs to a device
  std::uint64_t devices = 0;  // of mapped memory: a bit for each device that has access

  bool is_pinned() const { return kind == MemoryKind::kPinned || kind == MemoryKind::kRegistered; }
  bool is_managed() const { return kind == MemoryKind::kManaged; }
};

// The allocation that the address is in, if it is one of CUDA's.
std::optional<Region> region_of(const void* address);

// Sets the address to memory that is new. It is NaN, unless it is pinned.
cudaError_t allocate(void** address, std::size_t bytes, int device, MemoryKind kind);

// Maps memory that another process has allocated on the device. Returns null if there is none.
void* open_memory(const SharedRange& range, int device);

// The steps of cuMemCreate, cuMemAddressReserve, cuMemMap and cuMemSetAccess. Mapping fills the
// memory with NaN. The functions return null or false if there is too little memory.
std::optional<SharedRange> take_memory(int device, std::size_t bytes);
void give_memory_back(int device, const SharedRange& range);
void* reserve_addresses(std::size_t bytes);
bool map_memory(void* address, const SharedRange& range, int device);
void set_access_of(void* address, int device, bool allows);
bool has_access(const Region& region, int device);

// Frees memory of the kind. The address is where it begins.
cudaError_t release(void* address, MemoryKind kind);

// Bytes of a device's pool: those in use, and the most that were in use since the mark was reset.
struct Usage {
  std::size_t now = 0;
  std::size_t high = 0;
};
Usage usage_of_pool(int device);
void reset_high_mark_of_pool(int device);

}  // namespace emulated_gpu
