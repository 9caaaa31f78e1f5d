// CUDA's results as errors, and the current device. Only CUDA implementations include this.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/check.h"

namespace fsdp {

// Throws an error with CUDA's text unless the call has succeeded, and clears CUDA's record of the
// last error. `call` is the source text of the call; the message names its function.
inline void check_cuda(cudaError_t result, std::string_view call) {
  if (result != cudaSuccess) {
    cudaGetLastError();
    throw Error(detail::concat(call.substr(0, call.find('(')), " failed: ",
                               cudaGetErrorString(result), " (", cudaGetErrorName(result), ")"));
  }
}

}  // namespace fsdp

#define FSDP_CUDA_CHECK(call) ::fsdp::check_cuda((call), #call)

namespace fsdp {

// Makes `device` current, and restores the previous device at the end of the scope.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device) {
    FSDP_CUDA_CHECK(cudaGetDevice(&before_));
    if (before_ != device) {
      FSDP_CUDA_CHECK(cudaSetDevice(device));
      changed_ = true;
    }
  }
  ~CudaDeviceGuard() {
    if (changed_) {
      cudaSetDevice(before_);
    }
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace fsdp
