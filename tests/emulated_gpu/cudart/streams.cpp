#include "streams.h"

#include <pthread.h>

#include <algorithm>
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
#include "pinned_uses.h"
#include "records.h"
#include "settings.h"
#include "wait_sites.h"

namespace emulated_gpu {
namespace {

struct Streams {
  std::mutex mutex;
  std::map<Stream*, std::shared_ptr<Stream>> all;
  std::map<int, std::shared_ptr<Stream>> legacy;                 // by device
  std::map<int, std::vector<std::shared_ptr<Stream>>> blocking;  // the others that are, by device
  // Destroyed since the host last waited for their device, by device.
  std::map<int, std::vector<std::shared_ptr<Stream>>> destroyed;
  unsigned long long last_id = 0;

  std::shared_ptr<Stream> make(int device, int priority, unsigned flags) {
    auto stream = std::make_shared<Stream>(device, priority, flags, ++last_id);
    all[stream.get()] = stream;
    return stream;
  }
  const std::shared_ptr<Stream>& legacy_of(int device) {
    std::shared_ptr<Stream>& made = legacy[device];
    return made != nullptr ? made : made = make(device, 0, cudaStreamDefault);
  }
  std::shared_ptr<Stream> make_blocking(int device, int priority) {
    return blocking[device].emplace_back(make(device, priority, cudaStreamDefault));
  }
};
Streams& streams() { return lasting<Streams>(); }

std::shared_ptr<Stream> legacy_of(int device) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return streams().legacy_of(device);
}

// The other blocking streams of its device, if the stream is a legacy default one.
std::vector<std::shared_ptr<Stream>> blocking_beside(const Stream& stream) {
  Streams& known = streams();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const bool is_legacy = known.legacy_of(stream.device).get() == &stream;
  return is_legacy ? known.blocking[stream.device] : std::vector<std::shared_ptr<Stream>>();
}

// An error if the legacy default stream would have to wait for a stream that is captured.
cudaError_t refuse_implicit(const Stream& stream) {
  for (const std::shared_ptr<Stream>& other : blocking_beside(stream)) {
    if (is_captured(*other)) {
      invalidate_capture(*other);
      return failed(cudaErrorStreamCaptureImplicit,
                    "the legacy default stream would wait for a stream that is capturing");
    }
  }
  return cudaSuccess;
}

}  // namespace

Stream::Stream(int on_device, int with_priority, unsigned with_flags, unsigned long long number)
    : device(on_device), priority(with_priority), flags(with_flags), id(number), order(number) {}

std::shared_ptr<Stream> Stream::of(cudaStream_t handle) {
  static thread_local std::map<int, std::shared_ptr<Stream>> of_thread;
  Streams& known = streams();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const int device = use_current_device();
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return known.legacy_of(device);
  }
  if (handle == cudaStreamPerThread) {
    std::shared_ptr<Stream>& made = of_thread[device];
    return made != nullptr ? made : made = known.make_blocking(device, 0);
  }
  const auto found = known.all.find(reinterpret_cast<Stream*>(handle));
  return found != known.all.end() ? found->second : nullptr;
}

TicketPtr Stream::submit(const Label& label, Work work, ReadsPython reads_python) {
  const std::shared_ptr<const Origin> origin = origin_of(label.what, id, reads_python);
  if (is_captured(*this)) {
    Node node{origin, label.what, label.type, std::move(work), {}, {}, 0};
    if (add_to_capture(*this, node)) {
      return nullptr;
    }
    work = std::move(node.work);  // the capture has ended meanwhile
  }
  if (const cudaError_t error = follow_implicitly()) {
    refuse(error);
    return nullptr;
  }
  return push(origin, std::move(work));
}

cudaError_t Stream::follow_implicitly() {
  if (!is_blocking() || is_captured(*this)) {
    return cudaSuccess;
  }
  if (const cudaError_t error = refuse_implicit(*this)) {
    return error;
  }
  for (const std::shared_ptr<Stream>& other : blocking_beside(*this)) {
    follow(*other);
  }
  const std::shared_ptr<Stream> legacy = legacy_of(device);
  if (legacy.get() != this) {
    follow(*legacy);
  }
  return cudaSuccess;
}

// Work waits only for what was pushed before it, so no waits cross.
void Stream::follow(Stream& other) {
  order.wait_for(other.order.now());
  if (other.has_work()) {
    const auto record = std::make_shared<Record>(Clock());
    other.push(nullptr, [record] { record->reach(); });
    push(nullptr, [record] { record->wait(); });
  }
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
  std::minstd_rand random(
      static_cast<unsigned>(id * 7919 + static_cast<unsigned>(settings().seed)));
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !queue_.empty() || has_ended_; });
    if (queue_.empty()) {
      has_thread_ = false;
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

bool Stream::has_work() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !queue_.empty() || is_busy_;
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

unsigned long long new_stream_id() {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return ++streams().last_id;
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> found;
  const std::lock_guard<std::mutex> lock(streams().mutex);
  for (const auto& [handle, stream] : streams().all) {
    if (stream->device == device && !is_captured(*stream)) {
      found.push_back(stream);
    }
  }
  const std::vector<std::shared_ptr<Stream>>& destroyed = streams().destroyed[device];
  found.insert(found.end(), destroyed.begin(), destroyed.end());
  return found;
}

void synchronize_device(int device) {
  const std::vector<std::shared_ptr<Stream>> waited = streams_of(device);
  for (const std::shared_ptr<Stream>& stream : waited) {
    stream->synchronize();
  }
  const std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<std::shared_ptr<Stream>>& destroyed = streams().destroyed[device];
  const auto was_waited_for = [&](const auto& stream) {
    return std::find(waited.begin(), waited.end(), stream) != waited.end();
  };
  destroyed.erase(std::remove_if(destroyed.begin(), destroyed.end(), was_waited_for),
                  destroyed.end());
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
  stream.follow_implicitly();
  const Clock before = stream.order.now();
  stream.submit({"a function of the host", cudaGraphNodeTypeHost},
                [before, function = std::move(function), pending = begin_host_function()] {
                  host_waited_for(before);
                  function();
                });
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) {
    return failed(cudaErrorInvalidValue, "a stream has flags that do not exist");
  }
  Streams& known = streams();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const std::shared_ptr<Stream> made = flags == cudaStreamDefault
                                           ? known.make_blocking(use_current_device(), priority)
                                           : known.make(use_current_device(), priority, flags);
  *handle = reinterpret_cast<cudaStream_t>(made.get());
  return outcome();
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return failed(cudaErrorInvalidResourceHandle, "default streams are not destroyed");
  }
  std::shared_ptr<Stream> stream = Stream::of(handle);
  if (stream == nullptr) {
    return no_stream();
  }
  Streams& known = streams();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (stream->is_blocking()) {
    known.legacy_of(stream->device)->follow(*stream);
  }
  stream->end();
  std::vector<std::shared_ptr<Stream>>& blocking = known.blocking[stream->device];
  blocking.erase(std::remove(blocking.begin(), blocking.end(), stream), blocking.end());
  known.all.erase(stream.get());
  known.destroyed[stream->device].push_back(std::move(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return with_stream(handle, [&](Stream& stream) {
    *flags = stream.flags;
    return cudaSuccess;
  });
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
    if (const cudaError_t error = refuse_implicit(stream)) {
      return error;
    }
    for (const std::shared_ptr<Stream>& other : blocking_beside(stream)) {
      other->synchronize();
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
    if (const cudaError_t error = refuse_implicit(stream)) {
      return error;
    }
    bool is_idle = stream.is_idle();
    for (const std::shared_ptr<Stream>& other : blocking_beside(stream)) {
      is_idle = other->is_idle() && is_idle;
    }
    return is_idle ? outcome() : not_ready();
  });
}

cudaError_t cudaDeviceSynchronize() {
  if (is_left_out("cudaDeviceSynchronize")) {
    return outcome();
  }
  if (const cudaError_t error = refuse_during_captures("cudaDeviceSynchronize")) {
    return error;
  }
  synchronize_device(use_current_device());
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
