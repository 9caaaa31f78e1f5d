// A kernel that does nothing for a while, so that tests can hold a stream up.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>

namespace fsdp {

// On the current device, with one thread.
void launch_delay(cudaStream_t stream, std::chrono::microseconds duration);

}  // namespace fsdp
