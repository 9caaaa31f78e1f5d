#include "comm/nccl/nccl_calls.h"

#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace fsdp::nccl {
namespace {

// Most calls end within this many polls. Later polls leave the processor to other threads.
constexpr int kBusyPolls = 10000;

void pause_between_polls(int polls) {
  if (polls < kBusyPolls) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

Result poll(const Api& api, Comm comm) {
  Result state = kSuccess;
  const Result result = api.CommGetAsyncError(comm, &state);
  return result == kSuccess ? state : result;
}

Result finish(const std::function<Result()>& poll, Result result,
              const std::atomic<bool>& given_up) {
  for (int polls = 0; result == kInProgress && !given_up; ++polls) {
    result = poll();
    pause_between_polls(polls);
  }
  return result;
}

Result finish(const Api& api, Comm comm, Result result) {
  return finish([&] { return poll(api, comm); }, result, std::atomic<bool>{false});
}

std::function<void()> selector_of(const Device& device) {
  return [select = device.selector()] {
    try {
      select();
    } catch (const std::exception&) {
      // The next call fails, too.
    }
  };
}

std::future<Result> call_apart(std::function<void()> select, std::function<Result()> call) {
  std::packaged_task<Result()> task([select = std::move(select), call = std::move(call)] {
    select();
    return call();
  });
  std::future<Result> result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace fsdp::nccl
