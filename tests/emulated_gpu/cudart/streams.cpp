#include "streams.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "captures.h"
#include "errors.h"
#include "lasting.h"
#include "memory.h"
#include "settings.h"
#include "wait_sites.h"

namespace emulated_gpu {
namespace {

struct Streams {
  std::mutex mutex;
  std::map<Stream*, std::shared_ptr<Stream>> all;
  std::map<int, std::shared_ptr<Stream>> defaults;  // by device
  unsigned long long last_id = 0;

  std::shared_ptr<Stream> make(int device, int priority) {
    auto stream = std::make_shared<Stream>(device, priority, ++last_id);
    all[stream.get()] = stream;
    return stream;
  }
};
Streams& streams() { return lasting<Streams>(); }

constexpr std::uintptr_t kLastSpecialHandle = 2;  // cudaStreamPerThread

}  // namespace

Stream::Stream(int on_device, int with_priority, unsigned long long number)
    : device(on_device), priority(with_priority), id(number), order(number) {}

std::shared_ptr<Stream> Stream::of(cudaStream_t handle) {
  Streams& known = streams();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (reinterpret_cast<std::uintptr_t>(handle) <= kLastSpecialHandle) {
    std::shared_ptr<Stream>& made = known.defaults[current_device()];
    if (made == nullptr) {
      made = known.make(current_device(), 0);
    }
    return made;
  }
  const auto found = known.all.find(reinterpret_cast<Stream*>(handle));
  return found != known.all.end() ? found->second : nullptr;
}

TicketPtr Stream::submit(const std::string& what, Work work, ReadsPython reads_python) {
  const std::shared_ptr<const Origin> origin = origin_of(what, id, reads_python);
  return add_to_capture(*this, origin, work) ? nullptr : push(origin, std::move(work));
}

TicketPtr Stream::push(const std::shared_ptr<const Origin>& origin, Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TicketPtr ticket = order.next(origin);
  queue_.push_back({ticket, std::move(work)});
  if (!has_thread_) {
    has_thread_ = true;
    std::thread(&Stream::run, shared_from_this()).detach();
  }
  changed_.notify_all();
  return ticket;
}

void Stream::run(const std::shared_ptr<Stream>& stream) {
  char name[16];
  std::snprintf(name, sizeof(name), "gpu%d stream%llu", stream->device, stream->id);
  pthread_setname_np(pthread_self(), name);
  set_current_device(stream->device);
  stream->run_queue();
}

void Stream::run_queue() {
  const int most_delay_us = settings().most_delay_us;
  std::minstd_rand random(static_cast<unsigned>(id * 7919 + static_cast<unsigned>(getpid())));
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !queue_.empty() || has_ended_; });
    if (queue_.empty()) {
      return;
    }
    Task task = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    if (most_delay_us > 0) {
      const unsigned delay = random() % static_cast<unsigned>(most_delay_us);
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    try {
      run_checked(task.ticket, task.work);
    } catch (const std::exception& error) {
      fail(error.what());
    }
    task = {};  // what it holds goes before the stream counts as idle
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !is_busy_; });
  host_waited_for(order.now());
}

bool Stream::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_idle = queue_.empty() && !is_busy_;
  if (is_idle) {
    host_waited_for(order.now());
  }
  return is_idle;
}

void Stream::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

void synchronize_device(int device) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    for (const auto& [handle, stream] : streams().all) {
      if (stream->device == device && !is_captured(*stream)) {
        all.push_back(stream);
      }
    }
  }
  for (const auto& stream : all) {
    stream->synchronize();
  }
}

void enqueue(cudaStream_t stream, const std::string& what, Work work) {
  Stream::of(stream)->submit(what, std::move(work));
}

void poison(cudaStream_t stream, void* address, std::size_t bytes, const std::string& why) {
  Stream::of(stream)->submit(
      why,
      [=] {
        writes(address, bytes);
        std::memset(address, kPoison, bytes);
      },
      ReadsPython::kNo);
}

void run_now(cudaStream_t handle, const std::string& what, const Work& work) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  run_checked(stream->order.next(origin_of(what, stream->id)), work);
  host_waited_for(stream->order.now());
}

bool is_capturing(cudaStream_t stream) { return is_captured(*Stream::of(stream)); }

}  // namespace emulated_gpu

using namespace emulated_gpu;

namespace {

cudaError_t no_stream() {
  return failed(cudaErrorInvalidResourceHandle, "the stream was destroyed");
}

// Calls use(stream), and returns what it returns.
template <typename Use>
cudaError_t with_stream(cudaStream_t handle, const Use& use) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  return stream != nullptr ? use(*stream) : no_stream();
}

// Runs a function of the host, which may tell others of the host that earlier work has ended.
void submit_function(Stream& stream, Work function) {
  const Clock before = stream.order.now();
  stream.submit("a function of the host", [before, function = std::move(function)] {
    host_waited_for(before);
    function();
  });
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned /*flags*/, int priority) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  *handle = reinterpret_cast<cudaStream_t>(streams().make(current_device(), priority).get());
  return outcome();
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  std::shared_ptr<Stream> stream = Stream::of(handle);
  if (stream == nullptr) {
    return no_stream();
  }
  stream->end();
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.erase(stream.get());
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return with_stream(handle, [&](Stream& stream) {
    *priority = stream.priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (is_left_out("cudaStreamSynchronize")) {
    return outcome();
  }
  return with_stream(handle, [](Stream& stream) {
    if (const cudaError_t error = refuse_when_captured(stream)) {
      return error;
    }
    stream.synchronize();
    return outcome();
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return with_stream(handle, [](Stream& stream) {
    if (const cudaError_t error = refuse_when_captured(stream)) {
      return error;
    }
    return stream.is_idle() ? outcome() : not_ready();
  });
}

cudaError_t cudaDeviceSynchronize() {
  if (is_left_out("cudaDeviceSynchronize")) {
    return outcome();
  }
  if (const cudaError_t error = refuse_during_captures("cudaDeviceSynchronize")) {
    return error;
  }
  synchronize_device(current_device());
  return outcome();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return with_stream(handle, [=](Stream& stream) {
    submit_function(stream, [=] { function(data); });
    return outcome();
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data,
                                  unsigned /*flags*/) {
  return with_stream(handle, [=](Stream& stream) {
    submit_function(stream, [=] { function(handle, cudaSuccess, data); });
    return outcome();
  });
}
}
