// Memory of devices that processes share. A handle says which part of which file of a process it
// is.
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "errors.h"
#include "handles.h"
#include "lasting.h"
#include "memory.h"
#include "peers.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

struct Opened {
  SharedRange range;
  int times;
};
struct AllOpened {
  std::mutex mutex;
  std::map<void*, Opened> by_address;
};
AllOpened& opened() { return lasting<AllOpened>(); }

bool is_same(const SharedRange& one, const SharedRange& other) {
  return one.process == other.process && one.file == other.file && one.offset == other.offset;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

// The handle is of the whole allocation, wherever in it the address is.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  const std::optional<Region> region = region_of(address);
  if (!region.has_value() || region->kind != MemoryKind::kDevice) {
    return failed(cudaErrorInvalidValue, "only memory of cudaMalloc can be shared");
  }
  write_handle(*handle, {kMemoryHandle, region->device, region->range});
  return outcome();
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned flags) {
  Handle read;
  if (flags != cudaIpcMemLazyEnablePeerAccess) {
    return failed(cudaErrorInvalidValue, "the flag has to be cudaIpcMemLazyEnablePeerAccess");
  }
  if (const cudaError_t error = read_handle(handle, kMemoryHandle, read)) {
    return error;
  }
  let_access(use_current_device(), read.device);
  const std::lock_guard<std::mutex> lock(opened().mutex);
  for (auto& [where, one] : opened().by_address) {
    if (is_same(one.range, read.range)) {
      ++one.times;
      *address = where;
      return outcome();
    }
  }
  *address = open_memory(read.range, read.device);
  if (*address == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the memory of the handle was freed");
  }
  opened().by_address[*address] = {read.range, 1};
  return outcome();
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  const std::lock_guard<std::mutex> lock(opened().mutex);
  const auto found = opened().by_address.find(address);
  if (found == opened().by_address.end()) {
    return failed(cudaErrorInvalidValue, "no handle was opened to this address");
  }
  if (--found->second.times > 0) {
    return outcome();
  }
  opened().by_address.erase(found);
  for (int device = 0; device < settings().devices; ++device) {
    synchronize_device(device);
  }
  return release(address, MemoryKind::kOpened);
}
}
