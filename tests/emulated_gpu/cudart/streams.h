// A stream: a thread of the host that runs the work of its queue in order.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "emulated_gpu.h"
#include "races.h"

namespace emulated_gpu {

struct Capture;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, int priority, unsigned long long id);

  // The handles 0 to 2 mean the current device's default stream. torch's other streams do not wait
  // for it, and neither does any stream here: so a wait that is missing shows.
  // Returns null if there is no such stream.
  static std::shared_ptr<Stream> of(cudaStream_t handle);

  // Runs the work in order, or adds it to the capture. Returns its ticket, which is null in
  // captures.
  TicketPtr submit(const std::string& what, Work work,
                   ReadsPython reads_python = ReadsPython::kYes);
  void synchronize();
  bool is_idle();
  // Lets the thread end, once its queue is empty.
  void end();

  const int device;
  const int priority;
  const unsigned long long id;

  // These belong to captures.cpp and are guarded by its mutex. The heads are the nodes that the
  // next one comes after.
  std::shared_ptr<Capture> capture;
  std::set<std::size_t> heads;

  StreamOrder order;

 private:
  struct Task {
    TicketPtr ticket;
    Work work;
  };

  static void run(const std::shared_ptr<Stream>& stream);
  void run_queue();
  TicketPtr push(const std::shared_ptr<const Origin>& origin, Work work);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool is_busy_ = false;
  bool has_thread_ = false;
  bool has_ended_ = false;
};

int current_device();
void set_current_device(int device);

// Waits for all streams of the device that no capture holds.
void synchronize_device(int device);

}  // namespace emulated_gpu
