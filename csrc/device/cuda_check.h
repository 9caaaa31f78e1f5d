// CUDA's results as errors, and the current device. Only CUDA implementations include this.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "base/check.h"
#include "device/cuda_driver.h"

namespace fsdp {

// The message if this build has no kernels for the current GPU. cudaErrorUnsupportedPtxVersion
// means that the build has PTX, and that the driver is older than the nvcc that made the PTX.
inline std::string lacks_kernels(cudaError_t result) {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const char* advice = result == cudaErrorUnsupportedPtxVersion
                           ? ", only PTX, and the driver is too old for it. Update the driver, or "
                             "build fsdp_ext with TORCH_CUDA_ARCH_LIST="
                           : ". Build it with TORCH_CUDA_ARCH_LIST=";
  return detail::concat("This build of fsdp_ext has no kernels for GPU ", device,
                        ", whose compute capability is ", major, ".", minor, advice, major, ".",
                        minor, ".");
}

// Throws an error with CUDA's text unless the call has succeeded, and clears CUDA's record of the
// last error. The error is OutOfMemory if memory ran out. `call` is the source text of the call;
// the message names its function.
inline void check_cuda(cudaError_t result, std::string_view call) {
  if (result != cudaSuccess) {
    cudaGetLastError();
    if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorUnsupportedPtxVersion) {
      throw Error(lacks_kernels(result));
    }
    const std::string message =
        detail::concat(call.substr(0, call.find('(')), " failed: ", cudaGetErrorString(result),
                       " (", cudaGetErrorName(result), ")");
    if (result == cudaErrorMemoryAllocation) {
      throw OutOfMemory(message);
    }
    throw Error(message);
  }
}

}  // namespace fsdp

#define FSDP_CUDA_CHECK(call) ::fsdp::check_cuda((call), #call)

namespace fsdp {

// Makes `device` current. At the end of the scope, restores the previous device if it has a
// context. A thread that has chosen no device is on GPU 0, and cudaSetDevice would make a context
// there, which takes hundreds of megabytes.
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
    if (changed_ && has_context(before_)) {
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
