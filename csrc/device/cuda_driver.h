// Looks up functions of the CUDA driver through CUDA's runtime. Only files of the CUDA build
// include this header.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fsdp {

// Sets `function`. Returns false if the driver lacks it.
template <typename Function>
bool find_driver_function(const char* name, Function*& function) {
  constexpr unsigned kVersion = 12000;  // NCCL uses virtual memory with drivers from CUDA 12.0 on
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &status);
  if (result != cudaSuccess) {
    cudaGetLastError();  // clears the error
  }
  function = reinterpret_cast<Function*>(found);
  return result == cudaSuccess && status == cudaDriverEntryPointSuccess && found != nullptr;
}

// Whether this process has a context on the device. True if the driver does not say.
inline bool has_context(int device) {
  static decltype(&::cuDevicePrimaryCtxGetState) state_of = nullptr;
  static const bool is_found = find_driver_function("cuDevicePrimaryCtxGetState", state_of);
  unsigned flags = 0;
  int is_active = 0;
  return !is_found || state_of(device, &flags, &is_active) != CUDA_SUCCESS || is_active != 0;
}

}  // namespace fsdp
