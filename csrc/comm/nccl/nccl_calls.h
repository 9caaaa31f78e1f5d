// Calls of NCCL that go on after the caller has stopped waiting for them.
#pragma once

#include <functional>
#include <future>

#include "comm/nccl/nccl_api.h"
#include "device/stream.h"

namespace fsdp::nccl {

// Returns a function that makes the device current for the thread that calls it. A new thread calls
// it before it calls NCCL or CUDA, or device 0 would get a context. If the device has failed, the
// function does nothing, and the thread's next call fails.
std::function<void()> selector_of(const Device& device);

// Runs the call on a thread of its own, after `select`. The thread goes on for as long as it takes.
std::future<Result> call_apart(std::function<void()> select, std::function<Result()> call);

}  // namespace fsdp::nccl
