#include "multiprocessors.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>

#include "lasting.h"
#include "library.h"

namespace emulated_gpu {
namespace {

using Clock = std::chrono::steady_clock;

struct Devices {
  std::mutex mutex;
  std::map<int, std::unique_ptr<Multiprocessors>> all;
};

int number_of(int device) {
  int number = 0;
  cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
  return number;
}

std::chrono::seconds longest_wait() {
  const char* text = std::getenv("EMULATED_GPU_STUCK_S");
  return std::chrono::seconds(text != nullptr && *text != '\0' ? std::atoi(text) : 60);
}

}  // namespace

Multiprocessors& Multiprocessors::of(int device) {
  auto& devices = lasting<Devices>();
  const std::lock_guard<std::mutex> lock(devices.mutex);
  std::unique_ptr<Multiprocessors>& made = devices.all[device];
  if (made == nullptr) {
    made = std::make_unique<Multiprocessors>(device);
  }
  return *made;
}

Multiprocessors::Multiprocessors(int device)
    : device_(device), number_(number_of(device)), free_(number_) {}

// NCCL reads the variable at the first launch of the process.
std::uint64_t Multiprocessors::next_turn() {
  static const bool is_ordered = is_set("NCCL_LAUNCH_ORDER_IMPLICIT");
  if (!is_ordered) {
    return 0;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++turns_;
}

bool Multiprocessors::can_start(int blocks, std::uint64_t turn) const {
  return blocks <= free_ && (turn == 0 || turn == started_ + 1);
}

void Multiprocessors::run(const std::string& what, int blocks, std::uint64_t turn,
                          const std::function<bool()>& is_given_up,
                          const std::function<void()>& kernel) {
  const auto since = Clock::now();
  blocks = std::min(blocks, number_);
  std::unique_lock<std::mutex> lock(mutex_);
  bool gives_up = false;
  while (!can_start(blocks, turn) && !gives_up) {
    if (Clock::now() - since > longest_wait()) {
      const std::string why = account(what, blocks, turn);
      lock.unlock();
      fail_device(why);
      lock.lock();
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    gives_up = is_given_up();
    lock.lock();
  }
  if (turn != 0) {
    started_early_.insert(turn);
    while (started_early_.erase(started_ + 1) > 0) {
      ++started_;
    }
  }
  if (gives_up) {
    return;
  }
  free_ -= blocks;
  const auto running = running_.insert(running_.end(), {what, blocks});
  lock.unlock();
  kernel();
  lock.lock();
  running_.erase(running);
  free_ += blocks;
}

std::string Multiprocessors::account(const std::string& what, int blocks,
                                     std::uint64_t turn) const {
  std::string text = what + " needs " + std::to_string(blocks) + " of the " +
                     std::to_string(number_) + " multiprocessors of device " +
                     std::to_string(device_) + " (EMULATED_GPU_SMS), and has waited for them " +
                     std::to_string(longest_wait().count()) + " s (EMULATED_GPU_STUCK_S).";
  for (const Running& one : running_) {
    text += " " + one.what + " holds " + std::to_string(one.blocks) + ".";
  }
  if (turn > started_ + 1) {
    text += " Earlier launches have not started (NCCL_LAUNCH_ORDER_IMPLICIT).";
  }
  return text + " Ranks that launch in different orders wait for each other for ever.";
}

}  // namespace emulated_gpu
