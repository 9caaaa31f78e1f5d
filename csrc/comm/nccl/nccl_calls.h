// Calls of NCCL that go on after the caller has stopped waiting for them.
#pragma once

#include <atomic>
#include <functional>
#include <future>

#include "comm/nccl/nccl_api.h"
#include "device/stream.h"

namespace fsdp::nccl {

// Returns the asynchronous error of a communicator; kInProgress if its last call is not done.
Result poll(const Api& api, Comm comm);

// Waits for a call that has returned `result`, and returns its final result. With
// NCCL_COMM_BLOCKING=0 in the environment every communicator is non-blocking, so NCCL goes on after
// a call has returned. Returns kInProgress if `given_up` is set meanwhile.
Result finish(const std::function<Result()>& poll, Result result,
              const std::atomic<bool>& given_up);
// Waits in the same way, but without an end.
Result finish(const Api& api, Comm comm, Result result);

// Returns a function that makes the device current for the thread that calls it. A new thread calls
// it before it calls NCCL or CUDA, or device 0 would get a context. If the device has failed, the
// function does nothing, and the thread's next call fails.
std::function<void()> selector_of(const Device& device);

// Runs the call on a thread of its own, after `select`. The thread goes on for as long as it takes.
std::future<Result> call_apart(std::function<void()> select, std::function<Result()> call);

}  // namespace fsdp::nccl
