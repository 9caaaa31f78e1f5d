// The multiprocessors of a device, which running collectives share.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <string>

namespace emulated_gpu {

// A kernel of NCCL occupies one multiprocessor for each of its thread blocks, and waits for its
// peers while it has them. So a kernel starts when there are enough for all of its blocks. Each
// process has devices of its own.
class Multiprocessors {
 public:
  static Multiprocessors& of(int device);

  explicit Multiprocessors(int device);

  int number() const { return number_; }

  // The place of a launch in the order of the host, if NCCL_LAUNCH_ORDER_IMPLICIT=1; else 0.
  std::uint64_t next_turn();

  // Runs the kernel once it fits and, if it has a turn, all kernels of earlier turns have started.
  // It fails the device if that takes too long (EMULATED_GPU_STUCK_S), and returns without having
  // run the kernel if `is_given_up`.
  void run(const std::string& what, int blocks, std::uint64_t turn,
           const std::function<bool()>& is_given_up, const std::function<void()>& kernel);

 private:
  struct Running {
    std::string what;
    int blocks;
  };

  bool can_start(int blocks, std::uint64_t turn) const;
  std::string account(const std::string& what, int blocks, std::uint64_t turn) const;

  const int device_;
  const int number_;
  std::mutex mutex_;  // guards what follows
  std::list<Running> running_;
  int free_;
  std::uint64_t turns_ = 0;
  std::uint64_t started_ = 0;  // the last turn before which all have started
  // Turns that were given up before earlier ones have started.
  std::set<std::uint64_t> started_early_;
};

}  // namespace emulated_gpu
