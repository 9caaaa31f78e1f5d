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
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "races.h"

namespace emulated_gpu {

struct Capture;

// What work is, in messages and in graphs.
struct Label {
  std::string what;
  cudaGraphNodeType type;

  Label(std::string text, cudaGraphNodeType of_type = cudaGraphNodeTypeKernel)
      : what(std::move(text)), type(of_type) {}
  Label(const char* text) : Label(std::string(text)) {}
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, int priority, unsigned flags, unsigned long long id);

  // The handles 0 and 1 mean the current device's legacy default stream, and 2 the default stream
  // that the calling thread has on the current device. Returns null if there is no such stream.
  static std::shared_ptr<Stream> of(cudaStream_t handle);

  // Runs the work in order, or adds it to the capture. Returns its ticket, which is null in
  // captures.
  TicketPtr submit(const Label& label, Work work, ReadsPython reads_python = ReadsPython::kYes);
  // Runs work that consists of parts, each with a ticket of its own. No capture may hold the
  // stream.
  void submit_parts(Work work) { push(nullptr, std::move(work)); }
  // Later work of this stream comes after all that the other one has now.
  void follow(Stream& other);
  // What each call does that gives the legacy default stream or a blocking stream work: the former
  // follows all of the latter, and each of these follows it. An error if one of them is captured.
  cudaError_t follow_implicitly();
  void synchronize();
  bool is_idle();
  // Lets the thread end, once its queue is empty.
  void end();

  const int device;
  const int priority;
  const unsigned flags;  // of its creation
  const unsigned long long id;

  bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }

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
  bool has_work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool is_busy_ = false;
  bool has_thread_ = false;
  bool has_ended_ = false;
};

int use_current_device();
bool has_context(int device);
void set_current_device(int device);

// An id that no stream has.
unsigned long long new_stream_id();

// All streams of the device that no capture holds, and those that were destroyed since the host
// last waited for the device.
std::vector<std::shared_ptr<Stream>> streams_of(int device);

// Waits for all of these.
void synchronize_device(int device);

}  // namespace emulated_gpu
