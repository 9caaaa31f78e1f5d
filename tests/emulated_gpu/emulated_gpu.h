// What the emulated GPU offers to its own libraries, beyond CUDA's runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace emulated_gpu {

using Work = std::function<void()>;

// Runs `work` in order of the stream. While the stream is captured, `work` becomes a node of the
// graph instead, and runs in each replay.
void enqueue(cudaStream_t stream, Work work);

bool is_capturing(cudaStream_t stream);

// As cudaStreamWaitEvent, also where EMULATED_GPU_DROP_WAITS makes that do nothing.
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
