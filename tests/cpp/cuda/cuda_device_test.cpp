// What a user is told of a GPU that cannot be used, and what GPUs keep.
#include <gtest/gtest.h>

#include <thread>

#include "device/cuda_check.h"
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

TEST(CudaDevice, WithADriverThatIsTooOldForThePtxIsNamed) {
  kernels_loaded = cudaErrorUnsupportedPtxVersion;
  const std::string message =
      message_of([] { make_cuda_device(0, kTimeout, {&current_stream, &allocate_for}); });
  kernels_loaded = cudaSuccess;
  EXPECT_EQ(message,
            "This build of fsdp_ext has no kernels for GPU 0, whose compute capability is 7.5, "
            "only PTX, and the driver is too old for it. Update the driver, or build fsdp_ext with "
            "TORCH_CUDA_ARCH_LIST=7.5.");
}

int current_device() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

// The thread is on device 0, since it has chosen none.
TEST(CudaDevice, WithoutAContextGetsNoneWhenAnotherHasBeenUsed) {
  std::thread([] {
    has_context_on[0] = false;
    {
      const CudaDeviceGuard guard(1);
    }
    EXPECT_FALSE(has_context_on[0]);
    cudaSetDevice(0);
    {
      const CudaDeviceGuard guard(1);
      EXPECT_EQ(current_device(), 1);
    }
    EXPECT_EQ(current_device(), 0);
  }).join();
}

// Note [lasting streams]: torch's allocator uses the streams of lanes that are gone.
TEST(CudaDevice, GivesNewLanesTheStreamsOfOldOnes) {
  std::thread([] {
    const auto device = make_cuda_device(0, kTimeout, {&current_stream, &allocate_for});
    std::unique_ptr<Stream> old = device->new_stream("gather");
    void* const handle = old->native_handle();
    old.reset();
    EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(handle)), cudaSuccess);
    const std::unique_ptr<Stream> first = device->new_stream("gather");
    const std::unique_ptr<Stream> second = device->new_stream("reduce");
    EXPECT_EQ(first->native_handle(), handle);
    EXPECT_NE(second->native_handle(), handle);
  }).join();
}

TEST(CudaDevice, WithTooLittleMemoryThrowsOutOfMemory) {
  const auto fail_with = [](cudaError_t result) {
    return [result] { check_cuda(result, "cudaHostAlloc(&memory, bytes, 0)"); };
  };
  EXPECT_TRUE(contains(message_of<OutOfMemory>(fail_with(cudaErrorMemoryAllocation)),
                       "cudaHostAlloc failed: what CUDA says"));
  EXPECT_THROW(message_of<OutOfMemory>(fail_with(cudaErrorInvalidValue)), Error);
}

}  // namespace
}  // namespace fsdp::test
