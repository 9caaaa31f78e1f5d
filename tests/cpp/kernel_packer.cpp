#include "kernel_packer.h"

#include "kernels_under_test.h"

namespace fsdp::test {

std::unique_ptr<Packer> make_kernels_under_test() {
  return std::make_unique<KernelPacker>(/*warps=*/3);
}

bool kernels_have_one_nan() { return false; }

}  // namespace fsdp::test
