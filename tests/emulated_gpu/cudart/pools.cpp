// The default memory pool of each device. It gives memory back to the device at once.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "captures.h"
#include "errors.h"
#include "lasting.h"
#include "memory.h"
#include "peers.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

struct Pool {
  int device = 0;
  std::mutex mutex;
  std::map<cudaMemPoolAttr, std::uint64_t> set;  // which change nothing
};
Pool& pool_of(int device) {
  static auto* pools = new std::map<int, Pool>;
  static auto* mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  Pool& pool = (*pools)[device];
  pool.device = device;
  return pool;
}
Pool& as_pool(cudaMemPool_t handle) { return *reinterpret_cast<Pool*>(handle); }

bool is_number(cudaMemPoolAttr attribute) {  // of 64 bits, and an int otherwise
  return attribute >= cudaMemPoolAttrReleaseThreshold;
}

bool is_settable(cudaMemPoolAttr attribute) { return attribute <= cudaMemPoolAttrReleaseThreshold; }

bool is_high_mark(cudaMemPoolAttr attribute) {
  return attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh;
}

cudaError_t check_stream(const std::shared_ptr<Stream>& stream) {
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the stream was destroyed");
  }
  if (is_captured(*stream)) {
    return failed(cudaErrorNotSupported, "allocations as nodes of graphs are not emulated");
  }
  return cudaSuccess;
}

// Says on the stream that memory begins or ends, for the checker. torch's allocator holds its lock.
void note_on(Stream& stream, const char* call, void* address, std::size_t bytes) {
  stream.submit(call, [=] { writes(address, bytes); }, ReadsPython::kNo);
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t handle) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  if (const cudaError_t error = check_stream(stream)) {
    return error;
  }
  if (const cudaError_t error = allocate(address, bytes, stream->device, MemoryKind::kPool)) {
    return error;
  }
  note_on(*stream, "cudaMallocAsync", *address, bytes);
  return outcome();
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  if (const cudaError_t error = check_stream(stream)) {
    return error;
  }
  const std::optional<Region> region = region_of(address);
  if (!region.has_value() || region->kind != MemoryKind::kPool) {
    return failed(cudaErrorInvalidValue, "cudaFreeAsync needs memory of cudaMallocAsync");
  }
  note_on(*stream, "cudaFreeAsync", address, region->bytes);
  stream->submit(
      "the end of cudaFreeAsync", [address] { release(address, MemoryKind::kPool); },
      ReadsPython::kNo);
  return outcome();
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (device < 0 || device >= settings().devices) {
    return failed(cudaErrorInvalidDevice, "there is no such device");
  }
  *pool = reinterpret_cast<cudaMemPool_t>(&pool_of(device));
  return outcome();
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  Pool& pool = as_pool(handle);
  const Usage usage = usage_of_pool(pool.device);
  const std::lock_guard<std::mutex> lock(pool.mutex);
  const bool is_initially_on = !is_number(attribute);
  std::uint64_t found = pool.set.try_emplace(attribute, is_initially_on ? 1 : 0).first->second;
  if (!is_settable(attribute)) {
    found = is_high_mark(attribute) ? usage.high : usage.now;
  }
  if (is_number(attribute)) {
    *static_cast<std::uint64_t*>(value) = found;
  } else {
    *static_cast<int*>(value) = static_cast<int>(found);
  }
  return outcome();
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  Pool& pool = as_pool(handle);
  const std::uint64_t number = is_number(attribute)
                                   ? *static_cast<std::uint64_t*>(value)
                                   : static_cast<std::uint64_t>(*static_cast<int*>(value));
  if (is_high_mark(attribute) && number == 0) {
    reset_high_mark_of_pool(pool.device);
    return outcome();
  }
  if (!is_settable(attribute)) {
    return failed(cudaErrorInvalidValue, "this attribute of a pool is not set, or only to 0");
  }
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.set[attribute] = number;
  return outcome();
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t /*pool*/, std::size_t /*bytes*/) { return outcome(); }

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t handle, const cudaMemAccessDesc* access,
                                 std::size_t count) {
  const int owner = as_pool(handle).device;
  for (std::size_t number = 0; number < count; ++number) {
    const cudaMemLocation& location = access[number].location;
    const bool allows = access[number].flags == cudaMemAccessFlagsProtReadWrite;
    if (location.type != cudaMemLocationTypeDevice || location.id < 0 ||
        location.id >= settings().devices || (location.id == owner && !allows)) {
      return failed(cudaErrorInvalidValue, "the access to a pool is not for another device");
    }
    set_access_to_pool(location.id, owner, allows);
  }
  return outcome();
}
}
