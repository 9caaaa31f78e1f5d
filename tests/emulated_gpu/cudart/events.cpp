// Events. An event stands for its last record, on a stream or in a capture.
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "captures.h"
#include "errors.h"
#include "streams.h"
#include "wait_sites.h"

namespace emulated_gpu {
namespace {

using WallClock = std::chrono::steady_clock;

// One record. Later records of the event do not change it, and streams that wait for it hold it.
class Record {
 public:
  explicit Record(Clock reached_after) : clock(std::move(reached_after)) {}

  const Clock clock;

  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_reached_ = true;
    time_ = WallClock::now();
    changed_.notify_all();
  }
  bool is_reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_reached_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_reached_; });
  }
  WallClock::time_point time() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  WallClock::time_point time_;
};

// Guarded by the mutex of captures.
struct Event {
  int device;
  bool has_time;
  std::shared_ptr<Record> record;
  std::shared_ptr<Capture> capture;
  std::set<std::size_t> heads;
};
Event& as_event(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

// Sets `record` to the last one, which may be null. Events of captures have none.
cudaError_t last_record(const Event& event, std::shared_ptr<Record>& record) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (event.capture != nullptr) {
    return failed(cudaErrorCapturedEvent, "the event was recorded in a capture");
  }
  record = event.record;
  return cudaSuccess;
}

// `orders`: whether later work of the stream counts as ordered after the event.
cudaError_t wait_for_event(cudaStream_t handle, cudaEvent_t event_handle, bool orders) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  const Event& event = as_event(event_handle);
  std::shared_ptr<Record> record;
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (event.capture != nullptr) {
      return join_capture(*stream, event.capture, event.heads);
    }
    record = event.record;
    if (record != nullptr && stream->capture != nullptr) {
      stream->capture->is_invalid = true;
      return failed(cudaErrorStreamCaptureIsolation, "a captured stream waits for uncaptured work");
    }
  }
  if (record != nullptr) {
    if (orders) {
      stream->order.wait_for(record->clock);
    }
    stream->submit("a wait for an event", [record] { record->wait(); });
  }
  return outcome();
}

}  // namespace

void wait_for(cudaStream_t stream, cudaEvent_t event) {
  wait_for_event(stream, event, /*orders=*/false);
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  const bool has_time = (flags & cudaEventDisableTiming) == 0;
  *handle = reinterpret_cast<cudaEvent_t>(new Event{current_device(), has_time, {}, {}, {}});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete &as_event(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                     unsigned flags) {
  const std::shared_ptr<Stream> stream = Stream::of(stream_handle);
  Event& event = as_event(handle);
  if (flags != cudaEventRecordDefault) {
    return failed(cudaErrorNotSupported, "external events are not emulated");
  }
  if (stream == nullptr || stream->device != event.device) {
    return failed(cudaErrorInvalidResourceHandle, "the event and the stream are of two devices");
  }
  auto record = std::make_shared<Record>(stream->order.now());
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    event.capture = stream->capture;
    if (event.capture != nullptr) {
      event.heads = stream->heads;
      return cudaSuccess;
    }
    event.record = record;
  }
  stream->submit("the record of an event", [record] { record->reach(); });
  return outcome();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  std::shared_ptr<Record> record;
  if (is_left_out("cudaEventQuery")) {
    return outcome();
  }
  if (const cudaError_t error = refuse_during_captures("cudaEventQuery")) {
    return error;
  }
  if (const cudaError_t error = last_record(as_event(handle), record)) {
    return error;
  }
  if (record != nullptr && !record->is_reached()) {
    return not_ready();
  }
  if (record != nullptr) {
    host_waited_for(record->clock);
  }
  return outcome();
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  std::shared_ptr<Record> record;
  if (is_left_out("cudaEventSynchronize")) {
    return outcome();
  }
  if (const cudaError_t error = last_record(as_event(handle), record)) {
    return error;
  }
  if (record != nullptr) {
    record->wait();
    host_waited_for(record->clock);
  }
  return outcome();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::shared_ptr<Record> begin;
  std::shared_ptr<Record> end;
  if (const cudaError_t error = last_record(as_event(from), begin)) {
    return error;
  }
  if (const cudaError_t error = last_record(as_event(to), end)) {
    return error;
  }
  if (begin == nullptr || end == nullptr || !as_event(from).has_time || !as_event(to).has_time) {
    return failed(cudaErrorInvalidResourceHandle, "an event has no time");
  }
  if (!begin->is_reached() || !end->is_reached()) {
    return not_ready();
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time() - begin->time()).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (flags != cudaEventWaitDefault) {
    return failed(cudaErrorNotSupported, "external events are not emulated");
  }
  if (is_left_out("cudaStreamWaitEvent")) {
    return outcome();
  }
  return wait_for_event(stream, event, /*orders=*/true);
}
}
