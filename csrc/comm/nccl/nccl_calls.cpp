#include "comm/nccl/nccl_calls.h"

#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace fsdp::nccl {
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
