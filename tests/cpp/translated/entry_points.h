// What nvcc's host code calls to register kernels and to launch them, in the place of CUDA's
// runtime. Who links entry_points.cpp defines these two functions. A kernel is known by the address
// of its stub on the host.
#pragma once

#include <cuda_runtime_api.h>

namespace fsdp::ptx {

void register_kernel(const void* host, const char* name);
cudaError_t launch_kernel(const void* host, dim3 grid, dim3 block, void** arguments,
                          cudaStream_t stream);

}  // namespace fsdp::ptx
