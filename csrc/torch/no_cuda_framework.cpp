// Replaces cuda_framework.cpp in a build without CUDA.
#include "torch/cuda_framework.h"

namespace fsdp {

CudaFramework cuda_framework() { return {}; }

}  // namespace fsdp
