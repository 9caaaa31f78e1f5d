#include "memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "captures.h"
#include "errors.h"
#include "lasting.h"
#include "races.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

constexpr std::size_t kPage = 4096;

struct Regions {
  std::mutex mutex;
  std::map<std::uintptr_t, Region> by_begin;
  std::map<int, std::size_t> used;  // bytes, by device
};
Regions& regions() { return lasting<Regions>(); }

// Returns null if there is no memory. A page without access is at either end.
char* map_between_guards(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes + 2 * kPage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  char* begin = static_cast<char*>(mapped) + kPage;
  mprotect(begin, bytes, PROT_READ | PROT_WRITE);
  return begin;
}

cudaError_t allocate(void** address, std::size_t bytes, int device) {
  *address = nullptr;
  if (bytes == 0) {
    return outcome();
  }
  const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (device != kPinned && known.used[device] + rounded > settings().memory_bytes) {
    return failed(cudaErrorMemoryAllocation, "the device has no more memory");
  }
  char* begin = map_between_guards(rounded);
  if (begin == nullptr) {
    return failed(cudaErrorMemoryAllocation, "the host has no more memory");
  }
  if (device != kPinned) {
    known.used[device] += rounded;
    std::memset(begin, kPoison, rounded);
  }
  const auto number = reinterpret_cast<std::uintptr_t>(begin);
  known.by_begin[number] = {number, rounded, device};
  *address = begin;
  return outcome();
}

// The addresses stay reserved without access, so that a late access is a fault.
cudaError_t release(void* address, bool is_pinned) {
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.by_begin.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == known.by_begin.end() || found->second.is_pinned() != is_pinned) {
    return failed(cudaErrorInvalidValue, "this memory was not allocated, or was freed already");
  }
  const Region region = found->second;
  known.by_begin.erase(found);
  if (!is_pinned) {
    known.used[region.device] -= region.bytes;
  }
  forget_uses(address, region.bytes);
  mmap(address, region.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  return outcome();
}

}  // namespace

std::optional<Region> region_of(const void* address) {
  Regions& known = regions();
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(known.mutex);
  auto after = known.by_begin.upper_bound(number);
  if (after == known.by_begin.begin()) {
    return std::nullopt;
  }
  const Region& region = (--after)->second;
  return number < region.begin + region.bytes ? std::optional<Region>(region) : std::nullopt;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

// CUDA may let cudaMalloc wait for the device, but does not promise it. Here it never waits.
cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  if (const cudaError_t error = refuse_during_captures("cudaMalloc")) {
    return error;
  }
  return allocate(address, bytes, current_device());
}

cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t /*stream*/) {
  return allocate(address, bytes, current_device());
}

cudaError_t cudaFree(void* address) {
  if (address == nullptr) {
    return outcome();
  }
  if (const cudaError_t error = refuse_during_captures("cudaFree")) {
    return error;
  }
  if (const std::optional<Region> region = region_of(address)) {
    synchronize_device(region->device);
  }
  return release(address, false);
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  enqueue(stream, "cudaFreeAsync", [address] { release(address, false); });
  return outcome();
}

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned /*flags*/) {
  return allocate(address, bytes, kPinned);
}

cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) {
    return outcome();
  }
  for (int device = 0; device < settings().devices; ++device) {
    synchronize_device(device);
  }
  return release(address, true);
}

cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned /*flags*/) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().by_begin[begin] = {begin, bytes, kPinned};
  return outcome();
}

cudaError_t cudaHostUnregister(void* address) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().by_begin.erase(reinterpret_cast<std::uintptr_t>(address));
  return outcome();
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  *total = settings().memory_bytes;
  *free = *total - regions().used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = cudaInvalidDeviceId;
  if (const std::optional<Region> region = region_of(address)) {
    void* same = const_cast<void*>(address);
    attributes->type = region->is_pinned() ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = region->is_pinned() ? 0 : region->device;
    attributes->devicePointer = same;
    attributes->hostPointer = region->is_pinned() ? same : nullptr;
  }
  return cudaSuccess;
}
}
