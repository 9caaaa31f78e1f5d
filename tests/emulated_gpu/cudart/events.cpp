#include "events.h"

#include <utility>

#include "captures.h"
#include "errors.h"
#include "handles.h"
#include "streams.h"
#include "wait_sites.h"

namespace emulated_gpu {

std::shared_ptr<Record> Event::next_record(const Clock& clock) {
  capture = nullptr;
  if (shared != nullptr) {
    record = SharedRecord::next(shared, clock);
  } else {
    record = std::make_shared<Record>(clock);
  }
  return record;
}

std::shared_ptr<Record> Event::last_record() const {
  return shared != nullptr ? SharedRecord::newest(shared, record) : record;
}

namespace {

using EventPtr = std::shared_ptr<Event>;

const EventPtr& as_event(cudaEvent_t handle) { return *reinterpret_cast<EventPtr*>(handle); }

// Makes the event a node of the stream's capture, and returns true, or returns false if the stream
// has none.
bool add_external(Stream& stream, const EventPtr& event, const Label& label) {
  if (!is_captured(stream)) {
    return false;
  }
  Node node{origin_of(label.what, stream.id), label.what, label.type, {}, event, {}, 0};
  return add_to_capture(stream, node);
}

cudaEvent_t new_handle(const Event& event) {
  return reinterpret_cast<cudaEvent_t>(new EventPtr(std::make_shared<Event>(event)));
}

// Sets `record` to the last one, which may be null. Events of captures have none.
cudaError_t last_record(cudaEvent_t handle, std::shared_ptr<Record>& record) {
  const Event& event = *as_event(handle);
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (event.capture != nullptr) {
    return failed(cudaErrorCapturedEvent, "the event was recorded in a capture");
  }
  record = event.last_record();
  return cudaSuccess;
}

// `orders`: whether later work of the stream counts as ordered after the event.
cudaError_t wait_for_event(cudaStream_t handle, cudaEvent_t event_handle, bool orders) {
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the stream was destroyed");
  }
  const Event& event = *as_event(event_handle);
  std::shared_ptr<Record> record;
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (event.capture != nullptr) {
      return join_capture(*stream, event.capture, event.heads);
    }
    record = event.last_record();
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
  const bool is_shared = (flags & cudaEventInterprocess) != 0;
  if (is_shared && has_time) {
    return failed(cudaErrorInvalidValue, "cudaEventInterprocess needs cudaEventDisableTiming");
  }
  auto shared = is_shared ? std::make_shared<SharedRecords>() : nullptr;
  if (shared != nullptr && shared->page == nullptr) {
    return failed(cudaErrorMemoryAllocation, "the host has no more memory");
  }
  *handle = new_handle({use_current_device(), has_time, std::move(shared), {}, {}, {}});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete &as_event(handle);
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  const Event& made = *as_event(event);
  if (made.shared == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the event is no cudaEventInterprocess one");
  }
  write_handle(*handle, {kEventHandle, made.device, made.shared->range});
  return outcome();
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  Handle read;
  if (const cudaError_t error = read_handle(handle, kEventHandle, read)) {
    return error;
  }
  auto shared = std::make_shared<SharedRecords>(read.range);
  if (shared->page == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the process of the event has ended");
  }
  *event = new_handle({read.device, false, std::move(shared), {}, {}, {}});
  return outcome();
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                     unsigned flags) {
  const std::shared_ptr<Stream> stream = Stream::of(stream_handle);
  Event& event = *as_event(handle);
  if (flags > cudaEventRecordExternal) {
    return failed(cudaErrorInvalidValue, "an event is recorded with flags that do not exist");
  }
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the stream was destroyed");
  }
  if (stream->device != event.device) {
    return failed(cudaErrorInvalidResourceHandle, "the event and the stream are of two devices");
  }
  if (flags == cudaEventRecordExternal &&
      add_external(*stream, as_event(handle),
                   {"the record of an external event", cudaGraphNodeTypeEventRecord})) {
    return outcome();
  }
  if (const cudaError_t error = stream->follow_implicitly()) {
    return error;
  }
  std::shared_ptr<Record> record;
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    event.capture = stream->capture;
    if (event.capture != nullptr) {
      event.heads = stream->heads;
      return cudaSuccess;
    }
    record = event.next_record(stream->order.now());
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
  if (const cudaError_t error = last_record(handle, record)) {
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
  if (const cudaError_t error = last_record(handle, record)) {
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
  if (const cudaError_t error = last_record(from, begin)) {
    return error;
  }
  if (const cudaError_t error = last_record(to, end)) {
    return error;
  }
  if (begin == nullptr || end == nullptr || !as_event(from)->has_time || !as_event(to)->has_time) {
    return failed(cudaErrorInvalidResourceHandle, "an event has no time");
  }
  if (!begin->is_reached() || !end->is_reached()) {
    return not_ready();
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time() - begin->time()).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  if (flags > cudaEventWaitExternal) {
    return failed(cudaErrorInvalidValue, "a stream waits with flags that do not exist");
  }
  if (is_left_out("cudaStreamWaitEvent")) {
    return outcome();
  }
  const std::shared_ptr<Stream> stream = Stream::of(handle);
  if (flags == cudaEventWaitExternal && stream != nullptr &&
      add_external(*stream, as_event(event),
                   {"a wait for an external event", cudaGraphNodeTypeWaitEvent})) {
    return outcome();
  }
  return wait_for_event(handle, event, /*orders=*/true);
}
}
