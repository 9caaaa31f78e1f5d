// Stands in for device/cuda_stream and pack/pack_cuda in a build without CUDA.
#include "core/check.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {
namespace {

constexpr const char* kHowTo =
    "expects a CUDA build of fsdp_ext but this is a CPU build; use a mesh of device type 'cpu'";

}  // namespace

std::unique_ptr<Device> make_cuda_device(int /*index*/, std::chrono::milliseconds /*timeout*/,
                                         CudaFramework /*framework*/) {
  throw Error(kHowTo);
}

std::unique_ptr<Packer> make_cuda_packer(Device& /*device*/) { throw Error(kHowTo); }

}  // namespace fsdp
