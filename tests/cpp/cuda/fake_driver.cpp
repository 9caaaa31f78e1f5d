#include "fake_driver.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "fake_cudart.h"

namespace fsdp::test {
namespace {

constexpr std::size_t kGranularity = 4096;

// Behind a handle. A mapping has a copy of the properties.
struct Created {
  std::size_t bytes;
  CUmemAllocationProp properties;
};

CUresult refuse() {
  ++fake_driver().refusals;
  return CUDA_ERROR_INVALID_VALUE;
}

CUmemGenericAllocationHandle new_handle(std::size_t bytes, const CUmemAllocationProp& properties) {
  ++fake_driver().handles;
  return reinterpret_cast<CUmemGenericAllocationHandle>(new Created{bytes, properties});
}

Created& created(CUmemGenericAllocationHandle handle) {
  return *reinterpret_cast<Created*>(handle);
}

// The sample is memory of the fake NCCL.
CUresult retain(CUmemGenericAllocationHandle* handle, void* /*sample*/) {
  if (!fake_driver().is_used_by_nccl) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.allocFlags.gpuDirectRDMACapable = 1;
  *handle = new_handle(kGranularity, properties);
  return CUDA_SUCCESS;
}

CUresult properties_of(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  *properties = created(handle).properties;
  return CUDA_SUCCESS;
}

CUresult granularity_of(std::size_t* granularity, const CUmemAllocationProp* /*properties*/,
                        CUmemAllocationGranularity_flags /*option*/) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  if (bytes % kGranularity != 0) {
    return refuse();
  }
  if (fake_driver().creations_to_fail > 0) {
    --fake_driver().creations_to_fail;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (bytes > fake_driver().most_bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = new_handle(bytes, *properties);
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  delete &created(handle);
  --fake_driver().handles;
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                 CUdeviceptr /*wanted*/, unsigned long long /*flags*/) {
  *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(alignment, bytes));
  ++fake_driver().reservations;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr address, std::size_t /*bytes*/) {
  FakeDriver& driver = fake_driver();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.mapped.count(address) != 0) {
    return refuse();
  }
  std::free(reinterpret_cast<void*>(address));
  --driver.reservations;
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
             CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  FakeDriver& driver = fake_driver();
  if (offset != 0 || bytes != created(handle).bytes) {
    return refuse();
  }
  const std::lock_guard<std::mutex> lock(driver.mutex);
  driver.mapped[address] = {bytes, created(handle).properties, {}};
  return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  FakeDriver& driver = fake_driver();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  const auto found = driver.mapped.find(address);
  if (found == driver.mapped.end() || found->second.bytes != bytes) {
    return refuse();
  }
  driver.mapped.erase(found);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                    std::size_t count) {
  FakeDriver& driver = fake_driver();
  if (driver.accesses_to_fail > 0) {
    --driver.accesses_to_fail;
    return CUDA_ERROR_INVALID_DEVICE;
  }
  const std::lock_guard<std::mutex> lock(driver.mutex);
  const auto found = driver.mapped.find(address);
  if (found == driver.mapped.end() || found->second.bytes != bytes) {
    return refuse();
  }
  found->second.access.assign(access, access + count);
  return CUDA_SUCCESS;
}

CUresult context_state(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context_on[device] ? 1 : 0;
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& functions() {
  static const std::map<std::string, void*> all{
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&retain)},
      {"cuMemGetAllocationPropertiesFromHandle", reinterpret_cast<void*>(&properties_of)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity_of)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&free_addresses)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&context_state)},
  };
  return all;
}

}  // namespace

FakeDriver& fake_driver() {
  static FakeDriver driver;
  return driver;
}

std::optional<FakeMapping> FakeDriver::mapping_at(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mapped.find(reinterpret_cast<CUdeviceptr>(address));
  return found != mapped.end() ? std::optional<FakeMapping>(found->second) : std::nullopt;
}

int FakeDriver::mappings() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(mapped.size());
}

}  // namespace fsdp::test

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                        unsigned /*version*/,
                                                        unsigned long long /*flags*/,
                                                        cudaDriverEntryPointQueryResult* result) {
  const auto found = fsdp::test::functions().find(name);
  const bool is_known = found != fsdp::test::functions().end();
  *function = is_known ? found->second : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
