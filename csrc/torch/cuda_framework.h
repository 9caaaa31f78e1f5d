// PyTorch's current stream and its caching allocator, for device/cuda_stream.cpp.
#pragma once

#include "device/stream.h"

namespace fsdp {

// Empty in a build without CUDA (no_cuda_framework.cpp).
CudaFramework cuda_framework();

}  // namespace fsdp
