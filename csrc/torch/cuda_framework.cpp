#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "base/check.h"
#include "torch/transports.h"

namespace fsdp {
namespace {

void* current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

// From the pool that torch's allocator has for `stream`: Note [memory and the compute stream].
std::shared_ptr<void> allocate(int device, std::size_t bytes, void* stream) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  try {
    return {c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(
                bytes, static_cast<cudaStream_t>(stream)),
            [](void* memory) { c10::cuda::CUDACachingAllocator::raw_delete(memory); }};
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(detail::concat(
        "The GPU has too little memory for ", bytes,
        " more bytes of shards, gradients or buffers. Call fully_shard on smaller modules, or use "
        "more ranks or a smaller batch. (",
        error.what_without_backtrace(), ")"));
  }
}

void free_cached() { c10::cuda::CUDACachingAllocator::emptyCache(); }

}  // namespace

CudaFramework cuda_framework() {
  at::globalContext().lazyInitDevice(at::kCUDA);  // makes the allocator
  return {&current_stream, &allocate, &free_cached};
}

}  // namespace fsdp
