#include "device/cuda_virtual_memory.h"

#include <cuda.h>

#include <optional>
#include <utility>

#include "base/align.h"
#include "device/cuda_driver.h"

namespace fsdp {
namespace {

struct Driver {
  decltype(&::cuMemRetainAllocationHandle) retain = nullptr;
  decltype(&::cuMemGetAllocationPropertiesFromHandle) properties_of = nullptr;
  decltype(&::cuMemGetAllocationGranularity) granularity_of = nullptr;
  decltype(&::cuMemCreate) create = nullptr;
  decltype(&::cuMemRelease) release = nullptr;
  decltype(&::cuMemAddressReserve) reserve = nullptr;
  decltype(&::cuMemAddressFree) free_addresses = nullptr;
  decltype(&::cuMemMap) map = nullptr;
  decltype(&::cuMemUnmap) unmap = nullptr;
  decltype(&::cuMemSetAccess) set_access = nullptr;
};

// Empty if the driver lacks a function.
std::optional<Driver> find_driver() {
  Driver driver;
  const bool has_all =
      find_driver_function("cuMemRetainAllocationHandle", driver.retain) &&
      find_driver_function("cuMemGetAllocationPropertiesFromHandle", driver.properties_of) &&
      find_driver_function("cuMemGetAllocationGranularity", driver.granularity_of) &&
      find_driver_function("cuMemCreate", driver.create) &&
      find_driver_function("cuMemRelease", driver.release) &&
      find_driver_function("cuMemAddressReserve", driver.reserve) &&
      find_driver_function("cuMemAddressFree", driver.free_addresses) &&
      find_driver_function("cuMemMap", driver.map) &&
      find_driver_function("cuMemUnmap", driver.unmap) &&
      find_driver_function("cuMemSetAccess", driver.set_access);
  return has_all ? std::optional<Driver>(driver) : std::nullopt;
}

std::optional<CUmemAllocationProp> properties_of(const Driver& driver, const void* sample) {
  CUmemGenericAllocationHandle handle{};
  if (driver.retain(&handle, const_cast<void*>(sample)) != CUDA_SUCCESS) {
    return std::nullopt;  // for example, memory from cudaMalloc
  }
  CUmemAllocationProp properties{};
  const bool is_known = driver.properties_of(&properties, handle) == CUDA_SUCCESS;
  driver.release(handle);
  return is_known ? std::optional<CUmemAllocationProp>(properties) : std::nullopt;
}

// Memory mapped at a new address. The destructor undoes the steps that succeeded.
class Mapping {
 public:
  Mapping(const Driver& driver, const CUmemAllocationProp& properties, std::size_t bytes,
          std::size_t granularity)
      : driver_(driver), bytes_(align_up(bytes, granularity)) {
    CUmemGenericAllocationHandle handle{};
    if (driver_.create(&handle, bytes_, &properties, 0) != CUDA_SUCCESS) {
      return;
    }
    is_reserved_ = driver_.reserve(&address_, bytes_, granularity, 0, 0) == CUDA_SUCCESS;
    is_mapped_ = is_reserved_ && driver_.map(address_, bytes_, 0, handle, 0) == CUDA_SUCCESS;
    driver_.release(handle);  // the mapping keeps the memory
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    has_access_ = is_mapped_ && driver_.set_access(address_, bytes_, &access, 1) == CUDA_SUCCESS;
  }
  ~Mapping() {
    if (is_mapped_) {
      driver_.unmap(address_, bytes_);
    }
    if (is_reserved_) {
      driver_.free_addresses(address_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Null if a call has failed.
  void* memory() const { return has_access_ ? reinterpret_cast<void*>(address_) : nullptr; }

 private:
  const Driver driver_;
  const std::size_t bytes_;
  CUdeviceptr address_ = 0;
  bool is_reserved_ = false;
  bool is_mapped_ = false;
  bool has_access_ = false;
};

}  // namespace

Device::Allocator cuda_allocator_like(const void* sample) {
  static const std::optional<Driver> driver = find_driver();
  if (!driver.has_value()) {
    return nullptr;
  }
  const std::optional<CUmemAllocationProp> properties = properties_of(*driver, sample);
  std::size_t granularity = 0;
  if (!properties.has_value() ||
      driver->granularity_of(&granularity, &*properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) !=
          CUDA_SUCCESS) {
    return nullptr;
  }
  return [properties = *properties, granularity](std::size_t bytes) -> std::shared_ptr<void> {
    auto mapping = std::make_shared<const Mapping>(*driver, properties, bytes, granularity);
    void* const memory = mapping->memory();
    return memory == nullptr ? nullptr : std::shared_ptr<void>(std::move(mapping), memory);
  };
}

}  // namespace fsdp
