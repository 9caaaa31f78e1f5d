// What a handle for other processes contains.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "errors.h"
#include "settings.h"
#include "shared_file.h"

namespace emulated_gpu {

constexpr std::uint64_t kMemoryHandle = 0x79726f6d656d2d65;
constexpr std::uint64_t kEventHandle = 0x746e6576652d2d65;

struct Handle {
  std::uint64_t type = 0;  // one of the two
  int device = 0;
  SharedRange range;
};

template <typename CudasHandle>
void write_handle(CudasHandle& to, const Handle& handle) {
  static_assert(sizeof(Handle) <= sizeof(CudasHandle));
  std::memset(&to, 0, sizeof(to));
  std::memcpy(&to, &handle, sizeof(handle));
}

template <typename CudasHandle>
cudaError_t read_handle(const CudasHandle& from, std::uint64_t type, Handle& handle) {
  std::memcpy(static_cast<void*>(&handle), &from, sizeof(handle));
  if (handle.type != type || handle.device >= settings().devices) {
    return failed(cudaErrorInvalidValue, "this is no handle, or one of a device that is not here");
  }
  if (handle.range.is_of_this_process()) {
    return failed(cudaErrorDeviceUninitialized, "the handle was made by this process");
  }
  return cudaSuccess;
}

}  // namespace emulated_gpu
