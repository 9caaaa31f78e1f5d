// Memory, and what communicators know of it.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "groups.h"
#include "lasting.h"

namespace emulated_gpu {
namespace {

struct Allocations {
  std::mutex mutex;
  std::map<const char*, std::size_t> bytes;
};
Allocations& allocations() { return lasting<Allocations>(); }

struct Allocation {
  const char* begin;
  std::size_t bytes;
};

std::optional<Allocation> allocation_of(const void* memory) {
  const auto* address = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  const auto after = allocations().bytes.upper_bound(address);
  if (after == allocations().bytes.begin()) {
    return std::nullopt;
  }
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes ? std::optional<Allocation>({begin, bytes}) : std::nullopt;
}

// NCCL's own default depends on the driver.
bool uses_virtual_memory() {
  const char* setting = std::getenv("NCCL_CUMEM_ENABLE");
  return setting == nullptr || std::string(setting) != "0";
}

// What this rank can find out about a window without the others.
ncclResult_t check_window(const Communicator& communicator, const void* address,
                          std::size_t bytes) {
  const std::optional<Allocation> memory = allocation_of(address);
  const std::string text = "ncclCommWindowRegister on rank " + std::to_string(communicator.rank);
  if (!memory.has_value()) {
    return refuse(ncclUnhandledCudaError, text + " got memory that is not from ncclMemAlloc");
  }
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - memory->begin);
  if (offset % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
    return refuse(ncclInvalidArgument, text + ": Window address must be suitably aligned.");
  }
  if (offset + bytes > memory->bytes) {
    return refuse(ncclInvalidArgument,
                  text + " got " + std::to_string(bytes) + " bytes, more than were allocated");
  }
  return ncclSuccess;
}

// All ranks wait for each other in it, as in NCCL, whether windows are symmetric or not.
ncclResult_t register_window(Communicator& communicator, const void* address, std::size_t bytes,
                             int flags, ncclWindow_t* window) {
  HostCall mine{
      "register window", bytes, flags, check_window(communicator, address, bytes), 0, 0, 0};
  if (const ncclResult_t result = communicator.meet(mine, nullptr)) {
    return result;
  }
  *window = communicator.registrations.add_window(address, bytes, flags,
                                                  communicator.registrations.take_offset(bytes));
  return ncclSuccess;
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

ncclResult_t ncclMemAlloc(void** address, std::size_t bytes) {
  if ((uses_virtual_memory() ? allocate_for_all_devices(address, bytes)
                             : cudaMalloc(address, bytes)) != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, "Cuda failure 'out of memory'");
  }
  const std::lock_guard<std::mutex> lock(allocations().mutex);
  allocations().bytes[static_cast<const char*>(*address)] = bytes;
  return ncclSuccess;
}

// Unlike cudaFree, ncclMemFree does not wait for work that uses virtual memory.
ncclResult_t ncclMemFree(void* address) {
  if (address == nullptr) {
    return ncclSuccess;
  }
  const std::optional<Allocation> memory = allocation_of(address);
  if (!memory.has_value() || memory->begin != address) {
    return refuse(ncclUnhandledCudaError, "ncclMemFree got what ncclMemAlloc did not return");
  }
  for (const CommunicatorPtr& communicator : all_communicators()) {
    const std::string uses = communicator->registrations.uses_of(address, memory->bytes);
    if (!uses.empty() && !communicator->is_revoked) {
      return refuse(ncclInvalidUsage, "ncclMemFree of memory that has " + uses + " on rank " +
                                          std::to_string(communicator->rank));
    }
  }
  {
    const std::lock_guard<std::mutex> lock(allocations().mutex);
    allocations().bytes.erase(memory->begin);
  }
  const cudaError_t result =
      uses_virtual_memory() ? free_for_all_devices(address) : cudaFree(address);
  return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* address, std::size_t bytes,
                              void** registered) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  *registered = communicator->registrations.add_buffer(address, bytes);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registered) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  if (registered == nullptr || communicator->registrations.remove_buffer(registered)) {
    return ncclSuccess;
  }
  return refuse(ncclInvalidUsage, "Deregister: Could not find handle");
}

// Ranks of several hosts have no windows in common. There 2.28 registers the buffer locally, and
// 2.29 does nothing.
ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* address, std::size_t bytes,
                                    ncclWindow_t* window, int flags) {
  const CommunicatorPtr communicator = communicator_of(handle);
  return in_group(communicator, [&] {
    const bool has_null_windows = library_version() >= kFirstWithNullWindows;
    if (window == nullptr || (has_null_windows && (address == nullptr || bytes == 0))) {
      return refuse(ncclInvalidArgument, "ncclCommWindowRegister got no memory");
    }
    const ncclResult_t result = communicator->readiness();
    if (result != ncclSuccess || address == nullptr || bytes == 0) {
      return result;
    }
    *window = nullptr;
    if (communicator->shares_windows()) {
      add_job(communicator,
              [=] { return register_window(*communicator, address, bytes, flags, window); });
    } else if (!has_null_windows) {
      *window = static_cast<ncclWindow_t>(communicator->registrations.add_buffer(address, bytes));
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  const CommunicatorPtr communicator = communicator_of(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  Registrations& registrations = communicator->registrations;
  const bool is_known =
      window == nullptr || (communicator->shares_windows() ? registrations.remove_window(window)
                                                           : registrations.remove_buffer(window));
  return is_known ? ncclSuccess : refuse(ncclInvalidUsage, "Deregister: Could not find handle");
}
}
