// Managed memory, which the host and all devices use. Where it is makes no difference here.
#include <cuda_runtime_api.h>

#include "captures.h"
#include "errors.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

cudaError_t check_place(const void* address, std::size_t bytes, const cudaMemLocation& location) {
  const std::optional<Region> region = region_of(address);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (bytes == 0 || !region.has_value() || !region->is_managed() ||
      begin + bytes > region->begin + region->bytes) {
    return failed(cudaErrorInvalidValue, "this is no managed memory, or more than was allocated");
  }
  if (location.type == cudaMemLocationTypeDevice &&
      (location.id < 0 || location.id >= settings().devices)) {
    return failed(cudaErrorInvalidDevice, "there is no such device");
  }
  if (location.type == cudaMemLocationTypeInvalid) {
    return failed(cudaErrorInvalidValue, "there is no such place");
  }
  return outcome();
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaMallocManaged(void** address, std::size_t bytes, unsigned flags) {
  if (bytes == 0 || (flags != cudaMemAttachGlobal && flags != cudaMemAttachHost)) {
    return failed(cudaErrorInvalidValue, "managed memory has no bytes, or unknown flags");
  }
  if (const cudaError_t error = refuse_during_captures("cudaMallocManaged")) {
    return error;
  }
  return allocate(address, bytes, use_current_device(), MemoryKind::kManaged);
}

cudaError_t cudaMemPrefetchAsync(const void* address, std::size_t bytes, cudaMemLocation location,
                                 unsigned flags, cudaStream_t stream) {
  if (flags != 0 || Stream::of(stream) == nullptr) {
    return failed(cudaErrorInvalidValue, "a prefetch has flags, or a stream that was destroyed");
  }
  return check_place(address, bytes, location);
}

cudaError_t cudaMemAdvise(const void* address, std::size_t bytes, cudaMemoryAdvise advice,
                          cudaMemLocation location) {
  if (advice < cudaMemAdviseSetReadMostly || advice > cudaMemAdviseUnsetAccessedBy) {
    return failed(cudaErrorInvalidValue, "there is no such advice");
  }
  return check_place(address, bytes, location);
}
}
