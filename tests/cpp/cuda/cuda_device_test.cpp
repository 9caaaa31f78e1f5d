// What a user is told of a GPU that cannot be used.
#include <gtest/gtest.h>

#include "message_of.h"
#include "stream_ranks.h"

namespace fsdp::test {
namespace {

TEST(CudaDevice, OfAKindThatTheBuildHasNoKernelsForIsNamed) {
  kernels_loaded = cudaErrorNoKernelImageForDevice;
  const std::string message =
      message_of([] { make_cuda_device(0, kTimeout, {&current_stream, &allocate_for}); });
  kernels_loaded = cudaSuccess;
  EXPECT_EQ(message,
            "This build of fsdp_ext has no kernels for GPU 0, whose compute capability is 7.5. "
            "Build it with TORCH_CUDA_ARCH_LIST=7.5.");
}

}  // namespace
}  // namespace fsdp::test
