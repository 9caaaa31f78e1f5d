// Groups of calls, and the communicators that handles stand for.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>

#include "communicator.h"

namespace emulated_gpu {

// Null if it was destroyed.
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle);

// Runs the collective on the stream: at once, or when the calling thread's group ends.
ncclResult_t submit(ncclComm_t handle, cudaStream_t stream,
                    const std::function<void(Communicator&)>& collective);

}  // namespace emulated_gpu
