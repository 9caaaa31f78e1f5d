// Replaces device/cuda_stream.cpp in a build without CUDA.
#include "base/check.h"
#include "device/stream.h"

namespace fsdp {

int cuda_driver_version() { throw Error(kNeedsCudaBuild); }

std::unique_ptr<Device> make_cuda_device(int /*index*/, std::chrono::milliseconds /*timeout*/,
                                         CudaFramework /*framework*/) {
  throw Error(kNeedsCudaBuild);
}

}  // namespace fsdp
