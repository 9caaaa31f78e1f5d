// What the emulated GPU offers to its own libraries, beyond CUDA's runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

namespace emulated_gpu {

using Work = std::function<void()>;

// Runs `work` in order of the stream. While the stream is captured, `work` becomes a node of the
// graph instead, and runs in each replay. `what` is its name in messages.
void enqueue(cudaStream_t stream, const std::string& what, Work work);

// Fills memory with NaN in order of the stream. This does not take Python's lock.
void poison(cudaStream_t stream, void* address, std::size_t bytes, const std::string& why);

// Runs the work on the calling thread, which has waited for the stream.
void run_now(cudaStream_t stream, const std::string& what, const Work& work);

// Work says what it uses, on its own thread. Memory that is not CUDA's does not count.
void reads(const void* address, std::size_t bytes);
void writes(const void* address, std::size_t bytes);

bool is_capturing(cudaStream_t stream);

// Allocate memory of the current device by the driver's functions for virtual memory, give each
// device access to it, and free it. Work that still uses it then faults.
cudaError_t allocate_for_all_devices(void** address, std::size_t bytes);
cudaError_t free_for_all_devices(void* address);

// As cudaStreamWaitEvent, but never left out (EMULATED_GPU_DROP_WAITS). Later work does not count
// as ordered, because no user has asked for this wait.
void wait_for(cudaStream_t stream, cudaEvent_t event);

// Fails as a kernel that faults: each later call of the runtime returns an error with `what`.
void fail(const std::string& what);

struct Launch {
  std::string name;  // of the kernel, mangled
  dim3 grid;
  dim3 block;
  void** arguments;
  cudaStream_t stream;
};

// Enqueues the launch and returns true, or returns false if it does not know the kernel.
using Launcher = bool (*)(const Launch& launch);

void add_launcher(Launcher launcher);

}  // namespace emulated_gpu
