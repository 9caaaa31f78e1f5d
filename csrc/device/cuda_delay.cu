#include <cstdint>

#include "device/cuda_check.h"
#include "device/cuda_delay.h"

namespace fsdp {
namespace {

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void delay_kernel(std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) {
    __nanosleep(1000);
  }
}

}  // namespace

void launch_delay(cudaStream_t stream, std::chrono::microseconds duration) {
  delay_kernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(duration.count()) * 1000);
  FSDP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fsdp
