#include "memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
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
constexpr int kReadAndWrite = PROT_READ | PROT_WRITE;

struct Regions {
  std::mutex mutex;
  std::map<std::uintptr_t, Region> by_begin;
  std::map<int, std::size_t> used;  // bytes, by device
  std::map<int, Usage> of_pools;    // by device
};
Regions& regions() { return lasting<Regions>(); }

SharedFile& memory_of(int device) {
  static auto* files = new std::map<int, SharedFile>;
  return files->try_emplace(device, "memory of an emulated GPU").first->second;
}

bool counts_as_used(MemoryKind kind) {
  return kind == MemoryKind::kDevice || kind == MemoryKind::kPool;
}

// Addresses without access, with a page more at either end. Returns null if there are none.
char* reserve_between_guards(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes + 2 * kPage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapped != MAP_FAILED ? static_cast<char*>(mapped) + kPage : nullptr;
}

void synchronize_all_devices() {
  for (int device = 0; device < settings().devices; ++device) {
    synchronize_device(device);
  }
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

cudaError_t allocate(void** address, std::size_t bytes, int device, MemoryKind kind) {
  *address = nullptr;
  if (bytes == 0) {
    return outcome();
  }
  const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (counts_as_used(kind) && known.used[device] + rounded > settings().memory_bytes) {
    return failed(cudaErrorMemoryAllocation, "the device has no more memory");
  }
  char* begin = reserve_between_guards(rounded);
  Region region{reinterpret_cast<std::uintptr_t>(begin), rounded, device, kind, {}};
  if (counts_as_used(kind)) {
    region.range = memory_of(device).take(rounded);
  }
  if (begin == nullptr || (counts_as_used(kind) ? !map_shared(region.range, begin)
                                                : mprotect(begin, rounded, kReadAndWrite) != 0)) {
    return failed(cudaErrorMemoryAllocation, "the host has no more memory");
  }
  if (!region.is_pinned()) {
    std::memset(begin, kPoison, rounded);
  }
  if (counts_as_used(kind)) {
    known.used[device] += rounded;
  }
  if (kind == MemoryKind::kPool) {
    Usage& usage = known.of_pools[device];
    usage.now += rounded;
    usage.high = std::max(usage.high, usage.now);
  }
  known.by_begin[region.begin] = region;
  *address = begin;
  return outcome();
}

void* open_memory(const SharedRange& range, int device) {
  char* begin = reserve_between_guards(range.bytes);
  if (begin == nullptr || !map_shared(range, begin)) {
    return nullptr;
  }
  const auto number = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().by_begin[number] = {number, range.bytes, device, MemoryKind::kOpened, range};
  return begin;
}

std::optional<SharedRange> take_memory(int device, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  std::size_t& used = regions().used[device];
  if (used + bytes > settings().memory_bytes) {
    return std::nullopt;
  }
  used += bytes;
  return memory_of(device).take(bytes);
}

void give_memory_back(int device, const SharedRange& range) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().used[device] -= range.bytes;
  give_back(range);
}

void* reserve_addresses(std::size_t bytes) { return reserve_between_guards(bytes); }

bool map_memory(void* address, const SharedRange& range, int device) {
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(regions().mutex);
  if (!map_shared(range, address)) {
    return false;
  }
  std::memset(address, kPoison, range.bytes);
  regions().by_begin[number] = {number, range.bytes, device, MemoryKind::kMapped, range};
  return true;
}

void set_access_of(void* address, int device, bool allows) {
  const std::uint64_t bit = std::uint64_t{1} << device;
  const std::lock_guard<std::mutex> lock(regions().mutex);
  std::uint64_t& devices = regions().by_begin.at(reinterpret_cast<std::uintptr_t>(address)).devices;
  devices = allows ? devices | bit : devices & ~bit;
}

bool has_access(const Region& region, int device) { return (region.devices >> device & 1U) != 0; }

// The addresses stay reserved without access, so that a late access is a fault.
cudaError_t release(void* address, MemoryKind kind) {
  Regions& known = regions();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.by_begin.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == known.by_begin.end() || found->second.kind != kind) {
    return failed(cudaErrorInvalidValue, "this memory was not allocated, or was freed already");
  }
  const Region region = found->second;
  known.by_begin.erase(found);
  forget_uses(address, region.bytes);
  mmap(address, region.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  if (counts_as_used(kind)) {
    known.used[region.device] -= region.bytes;
    give_back(region.range);
  }
  if (kind == MemoryKind::kPool) {
    known.of_pools[region.device].now -= region.bytes;
  }
  return outcome();
}

Usage usage_of_pool(int device) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  return regions().of_pools[device];
}

void reset_high_mark_of_pool(int device) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().of_pools[device].high = regions().of_pools[device].now;
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

// CUDA may let cudaMalloc wait for the device, but does not promise it. Here it never waits.
cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  if (const cudaError_t error = refuse_during_captures("cudaMalloc")) {
    return error;
  }
  return allocate(address, bytes, use_current_device(), MemoryKind::kDevice);
}

cudaError_t cudaFree(void* address) {
  if (address == nullptr) {
    return outcome();
  }
  if (const cudaError_t error = refuse_during_captures("cudaFree")) {
    return error;
  }
  const std::optional<Region> region = region_of(address);
  if (!region.has_value() || region->is_pinned() || region->kind == MemoryKind::kOpened ||
      region->kind == MemoryKind::kMapped) {
    return failed(cudaErrorInvalidValue, "cudaFree got memory that it has not allocated");
  }
  for (int device = 0; device < settings().devices; ++device) {
    if (device == region->device || region->is_managed()) {
      synchronize_device(device);
    }
  }
  return release(address, region->kind);
}

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned /*flags*/) {
  return allocate(address, bytes, kPinned, MemoryKind::kPinned);
}

cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) {
    return outcome();
  }
  synchronize_all_devices();
  return release(address, MemoryKind::kPinned);
}

cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned /*flags*/) {
  if (address == nullptr || bytes == 0) {
    return failed(cudaErrorInvalidValue, "memory without bytes is registered");
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  std::map<std::uintptr_t, Region>& known = regions().by_begin;
  const std::lock_guard<std::mutex> lock(regions().mutex);
  const auto after = known.lower_bound(begin + bytes);
  if (after != known.begin()) {
    const Region& last = std::prev(after)->second;
    if (begin < last.begin + last.bytes) {
      return failed(cudaErrorHostMemoryAlreadyRegistered, "the memory is CUDA's already");
    }
  }
  known[begin] = {begin, bytes, kPinned, MemoryKind::kRegistered, {}};
  return outcome();
}

cudaError_t cudaHostUnregister(void* address) {
  synchronize_all_devices();
  const std::lock_guard<std::mutex> lock(regions().mutex);
  const auto found = regions().by_begin.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == regions().by_begin.end() || found->second.kind != MemoryKind::kRegistered) {
    return failed(cudaErrorHostMemoryNotRegistered, "no registered memory begins there");
  }
  forget_uses(address, found->second.bytes);
  regions().by_begin.erase(found);
  return outcome();
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  *total = settings().memory_bytes;
  *free = *total - regions().used[use_current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = cudaInvalidDeviceId;
  if (const std::optional<Region> region = region_of(address)) {
    void* same = const_cast<void*>(address);
    const bool is_of_host = region->is_pinned() || region->is_managed();
    attributes->type = region->is_pinned()    ? cudaMemoryTypeHost
                       : region->is_managed() ? cudaMemoryTypeManaged
                                              : cudaMemoryTypeDevice;
    attributes->device = region->is_pinned() ? 0 : region->device;
    attributes->devicePointer = same;
    attributes->hostPointer = is_of_host ? same : nullptr;
  }
  return cudaSuccess;
}
}
