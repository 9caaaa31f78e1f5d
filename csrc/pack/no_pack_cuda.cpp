// Replaces pack/pack_cuda.cu in a build without CUDA.
#include "base/check.h"
#include "pack/pack.h"

namespace fsdp {

std::unique_ptr<Packer> make_cuda_packer(Device& /*device*/, int /*multiprocessors*/) {
  throw Error(kNeedsCudaBuild);
}

}  // namespace fsdp
