// Stand-ins for driver functions that cudaGetDriverEntryPointByVersion returns: virtual memory, and
// the state of a context. Each allocation can be mapped once, and only as a whole.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "emulated_gpu.h"
#include "errors.h"
#include "lasting.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

// Finer than a GPU's 2 MiB, so that accesses past the end of a buffer fault.
constexpr std::size_t kGranularity = 4096;

// Memory of a device. It is given back when it has no handles and is not mapped.
struct Created {
  SharedRange range;
  CUmemAllocationProp properties;
  int owners = 1;
};

struct VirtualMemory {
  std::mutex mutex;
  CUmemGenericAllocationHandle last_handle = 0;
  std::map<CUmemGenericAllocationHandle, Created> created;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped;
  std::map<CUdeviceptr, std::size_t> reserved;
  std::map<int, cudaStream_t> unmapping;  // streams, by device
};
VirtualMemory& all() { return lasting<VirtualMemory>(); }

CUresult refuse_driver(const std::string& what) {
  failed(cudaErrorInvalidValue, what);
  cudaGetLastError();  // calls of the driver leave no error with the runtime
  return CUDA_ERROR_INVALID_VALUE;
}

// The caller holds the mutex.
CUresult drop_owner(CUmemGenericAllocationHandle handle) {
  const auto found = all().created.find(handle);
  if (found == all().created.end()) {
    return refuse_driver("there is no such handle of memory");
  }
  if (--found->second.owners == 0) {
    give_memory_back(found->second.properties.location.id, found->second.range);
    all().created.erase(found);
  }
  return CUDA_SUCCESS;
}

bool is_memory_of_a_device(const CUmemAllocationProp& properties) {
  return properties.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties.location.id >= 0 &&
         properties.location.id < settings().devices;
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  if (!is_memory_of_a_device(*properties) || bytes == 0 || bytes % kGranularity != 0) {
    return refuse_driver("cuMemCreate got no pages of a device");
  }
  const std::optional<SharedRange> range = take_memory(properties->location.id, bytes);
  if (!range.has_value()) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const std::lock_guard<std::mutex> lock(all().mutex);
  *handle = ++all().last_handle;
  all().created[*handle] = {*range, *properties};
  return CUDA_SUCCESS;
}

CUresult release_handle(CUmemGenericAllocationHandle handle) {
  const std::lock_guard<std::mutex> lock(all().mutex);
  return drop_owner(handle);
}

CUresult granularity_of(std::size_t* granularity, const CUmemAllocationProp* /*properties*/,
                        CUmemAllocationGranularity_flags /*option*/) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t /*alignment*/,
                 CUdeviceptr /*wanted*/, unsigned long long /*flags*/) {
  *address = reinterpret_cast<CUdeviceptr>(reserve_addresses(bytes));
  const std::lock_guard<std::mutex> lock(all().mutex);
  all().reserved[*address] = bytes;
  return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// The addresses stay reserved, so that a late access is a fault.
CUresult free_addresses(CUdeviceptr address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(all().mutex);
  const auto found = all().reserved.find(address);
  if (found == all().reserved.end() || found->second != bytes || all().mapped.count(address) != 0) {
    return refuse_driver("cuMemAddressFree got addresses that are mapped or not reserved");
  }
  all().reserved.erase(found);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
             CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  const std::lock_guard<std::mutex> lock(all().mutex);
  const auto found = all().created.find(handle);
  const auto reserved = all().reserved.find(address);
  if (found == all().created.end() || reserved == all().reserved.end() || offset != 0 ||
      bytes != found->second.range.bytes || bytes != reserved->second) {
    return refuse_driver("cuMemMap got no whole allocation, or addresses of another size");
  }
  for (const auto& [other, mapped] : all().mapped) {
    if (other == address || mapped == handle) {
      return refuse_driver("cuMemMap maps an address or an allocation again");
    }
  }
  if (!map_memory(reinterpret_cast<void*>(address), found->second.range,
                  found->second.properties.location.id)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  all().mapped[address] = handle;
  ++found->second.owners;
  return CUDA_SUCCESS;
}

// cuMemUnmap does not wait for work that uses the memory. A write shows such work as a race.
void show_uses(void* address, const Region& region) {
  const int before = use_current_device();
  set_current_device(region.device);
  cudaStream_t stream = nullptr;
  {
    const std::lock_guard<std::mutex> lock(all().mutex);
    stream = all().unmapping[region.device];
    if (stream == nullptr) {
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
      all().unmapping[region.device] = stream;
    }
  }
  if (has_access(region, region.device)) {
    enqueue(stream, "cuMemUnmap", [=] { writes(address, region.bytes); });
    cudaStreamSynchronize(stream);
  }
  set_current_device(before);
}

CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  auto* memory = reinterpret_cast<void*>(address);
  const std::optional<Region> region = region_of(memory);
  if (!region.has_value() || region->kind != MemoryKind::kMapped ||
      region->begin != static_cast<std::uintptr_t>(address) || region->bytes != bytes) {
    return refuse_driver("cuMemUnmap got no whole mapping");
  }
  show_uses(memory, *region);
  const std::lock_guard<std::mutex> lock(all().mutex);
  release(memory, MemoryKind::kMapped);
  const CUmemGenericAllocationHandle handle = all().mapped.at(address);
  all().mapped.erase(address);
  return drop_owner(handle);
}

CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                    std::size_t count) {
  auto* memory = reinterpret_cast<void*>(address);
  const std::optional<Region> region = region_of(memory);
  if (!region.has_value() || region->kind != MemoryKind::kMapped || region->bytes != bytes) {
    return refuse_driver("cuMemSetAccess got no whole mapping");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemLocation& location = access[i].location;
    if (location.type != CU_MEM_LOCATION_TYPE_DEVICE || location.id < 0 ||
        location.id >= settings().devices) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    set_access_of(memory, location.id, access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  return CUDA_SUCCESS;
}

CUresult access_of(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  const std::optional<Region> region = region_of(reinterpret_cast<void*>(address));
  if (!region.has_value() || region->kind != MemoryKind::kMapped) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *flags = has_access(*region, location->id) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                             : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

CUresult retain(CUmemGenericAllocationHandle* handle, void* memory) {
  const std::optional<Region> region = region_of(memory);
  if (!region.has_value() || region->kind != MemoryKind::kMapped) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::lock_guard<std::mutex> lock(all().mutex);
  *handle = all().mapped.at(static_cast<CUdeviceptr>(region->begin));
  ++all().created.at(*handle).owners;
  return CUDA_SUCCESS;
}

CUresult properties_of(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  const std::lock_guard<std::mutex> lock(all().mutex);
  const auto found = all().created.find(handle);
  if (found == all().created.end()) {
    return refuse_driver("there is no such handle of memory");
  }
  *properties = found->second.properties;
  return CUDA_SUCCESS;
}

CUresult context_state(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& functions() {
  static const auto* found = new std::map<std::string, void*>{
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&retain)},
      {"cuMemGetAllocationPropertiesFromHandle", reinterpret_cast<void*>(&properties_of)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity_of)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release_handle)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&free_addresses)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuMemGetAccess", reinterpret_cast<void*>(&access_of)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&context_state)},
  };
  return *found;
}

}  // namespace

cudaError_t allocate_for_all_devices(void** address, std::size_t bytes) {
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = use_current_device();
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr begin = 0;
  if (create(&handle, bytes, &properties, 0) != CUDA_SUCCESS) {
    return cudaErrorMemoryAllocation;
  }
  reserve(&begin, bytes, kGranularity, 0, 0);
  const bool is_mapped = map(begin, bytes, 0, handle, 0) == CUDA_SUCCESS;
  release_handle(handle);
  for (int device = 0; is_mapped && device < settings().devices; ++device) {
    CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access.location.id = device;
    set_access(begin, bytes, &access, 1);
  }
  *address = reinterpret_cast<void*>(begin);
  return is_mapped ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t free_for_all_devices(void* address) {
  const std::optional<Region> region = region_of(address);
  if (!region.has_value()) {
    return cudaErrorInvalidValue;
  }
  const auto begin = reinterpret_cast<CUdeviceptr>(address);
  const bool is_done = unmap(begin, region->bytes) == CUDA_SUCCESS &&
                       free_addresses(begin, region->bytes) == CUDA_SUCCESS;
  return is_done ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace emulated_gpu

// torch also asks for functions that are missing here, and works without them.
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                        unsigned /*version*/,
                                                        unsigned long long /*flags*/,
                                                        cudaDriverEntryPointQueryResult* result) {
  const auto& functions = emulated_gpu::functions();
  const auto found = functions.find(name);
  *function = found != functions.end() ? found->second : nullptr;
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
