// Replaces cuda_framework.cpp in a build without CUDA.
#include "torch/transports.h"

namespace fsdp {

CudaFramework cuda_framework() { return {}; }

}  // namespace fsdp
