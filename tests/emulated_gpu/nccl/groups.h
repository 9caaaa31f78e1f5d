// Groups of calls, calls that go on in the background, and the communicators that handles stand
// for.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace emulated_gpu {

using CommunicatorPtr = std::shared_ptr<Communicator>;

// Null, after refuse(), if there is no such communicator, or no longer.
CommunicatorPtr communicator_of(ncclComm_t handle);
std::vector<CommunicatorPtr> all_communicators();
ncclComm_t add_communicator(const CommunicatorPtr& communicator);
void remove_communicator(ncclComm_t handle);

// Runs the call as a group of its own, or as part of the group that the calling thread is in. Its
// error is also that of the group. On a communicator that does not block, a call that was begun
// returns ncclInProgress.
ncclResult_t in_group(const CommunicatorPtr& communicator,
                      const std::function<ncclResult_t()>& call);

// Adds a job to the group, which runs at its end, before collectives are enqueued. Call it within
// in_group. Jobs of different communicators run at the same time.
void add_job(const CommunicatorPtr& communicator, std::function<ncclResult_t()> job);

// Enqueues the collective on the stream at the end of the group.
ncclResult_t submit(Collective what, const void* from, const void* to, std::size_t bytes,
                    ncclComm_t handle, cudaStream_t stream,
                    std::function<void(Communicator&, const Collective&)> collective);

// As above, but all messages of a group are one piece of work.
ncclResult_t submit(const Message& message, ncclComm_t handle, cudaStream_t stream);

}  // namespace emulated_gpu
