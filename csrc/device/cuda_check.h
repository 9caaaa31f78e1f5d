// CUDA's own results as errors, and the current device. Only CUDA implementations include this.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

// Throws with what CUDA says, and clears CUDA's record of it where it has one.
#define FSDP_CUDA_CHECK(call)                                                                     \
  do {                                                                                            \
    const cudaError_t fsdp_result = (call);                                                       \
    if (fsdp_result != cudaSuccess) {                                                             \
      cudaGetLastError();                                                                         \
      throw ::fsdp::Error(::fsdp::detail::concat("CUDA: ", cudaGetErrorString(fsdp_result), " (", \
                                                 cudaGetErrorName(fsdp_result), ") from ", #call, \
                                                 " at ", __FILE__, ":", __LINE__));               \
    }                                                                                             \
  } while (false)

namespace fsdp {

// Makes `device` current and, at the end, what was current before.
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
