// Groups of calls, and the communicators that handles stand for.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>

#include "communicator.h"

namespace emulated_gpu {

// Null if it was destroyed.
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle);

// Enqueues the collective on the stream: now, or if the calling thread is between ncclGroupStart
// and ncclGroupEnd, at the end of that group.
ncclResult_t submit(const Collective& what, ncclComm_t handle, cudaStream_t stream,
                    const std::function<void(Communicator&)>& collective);

// As above, but all messages of a group are one piece of work.
ncclResult_t submit(const Message& message, ncclComm_t handle, cudaStream_t stream);

}  // namespace emulated_gpu
