// Seam 1 of 3: streams, which are in-order queues of work, the events that order them, and memory.
//
// Note [ordering by events]
// Work on one stream runs in the order of issue. Work on two streams is ordered only where an event
// was recorded on one and waited for on the other. Nothing else may be relied on for order: no host
// synchronisation and no assumption about durations. The host's streams are worker threads, so a
// missing wait is a real race even on a machine without a GPU, and ThreadSanitizer sees it.
//
// Note [errors on streams]
// Work that throws puts its stream into a failed state. Later work on the stream is skipped, and
// its events complete and carry the error. A stream that waits for such an event fails with the
// same error. A thread that blocks on the event (in synchronize, or as the compute stream of the
// host) gets the error thrown.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace fsdp {

// Throws the TimeoutError of a wait for `what`.
[[noreturn]] inline void throw_timeout(std::chrono::milliseconds timeout, const std::string& what) {
  throw TimeoutError(detail::concat("waited ", timeout.count(), " ms for ", what,
                                    ", which has not finished. A rank may hang, have failed, or "
                                    "run other collectives. Look at the output of all ranks."));
}

// A point on a stream. Recording an event again moves it. An event that was never recorded is
// complete.
class Event {
 public:
  virtual ~Event() = default;

  // Whether the work before the last record is done, or has failed.
  virtual bool query() const = 0;

  // Blocks the calling thread until then. Throws the stream's error if the work has failed, and a
  // TimeoutError that names `what` if it takes too long.
  virtual void synchronize(std::chrono::milliseconds timeout, const std::string& what) = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;

  virtual const std::string& name() const = 0;

  // `event` completes when all work issued to this stream so far has.
  virtual void record(Event& event) = 0;

  // Work issued to this stream from now on starts only after `event`. The compute stream of the
  // host is the calling thread itself, so there the call blocks. `what` names the event in error
  // messages and must outlive the wait. Returns false if the event is known to be complete, so that
  // there is nothing to wait for.
  virtual bool wait(Event& event, const std::string& what) = 0;

  // Blocks the calling thread until all issued work is done. Throws if any of it has failed.
  virtual void synchronize() = 0;

  // Whether a CUDA graph captures it.
  virtual bool is_capturing() const { return false; }

  // The hardware's own handle (a cudaStream_t), for implementations of the other seams.
  virtual void* native_handle() const { return nullptr; }
};

// Adds a stream's native handle to `streams` unless it is among them. Returns whether it is new.
inline bool note_stream(std::vector<void*>& streams, const Stream& stream) {
  void* const handle = stream.native_handle();
  if (std::find(streams.begin(), streams.end(), handle) != streams.end()) {
    return false;
  }
  streams.push_back(handle);
  return true;
}

// Numbered points on streams, and the times at which the streams reached them.
class Moments {
 public:
  virtual ~Moments() = default;

  // Moment `number` is when `stream` reaches this point. Marking it again moves it. Numbers start
  // at 0 and have no gaps.
  virtual void mark(std::size_t number, Stream& stream) = 0;
  // Prepares `count` moments, so that marking them allocates nothing.
  virtual void reserve(std::size_t count) = 0;

  // The time from moment `number` to moment `other` of `later`, which may be this object. Waits
  // until both are reached.
  virtual double seconds_to(std::size_t number, const Moments& later, std::size_t other) const = 0;
  // Whether the stream has reached moment `number` since it was marked last. It does not wait. A
  // stream of the host that has failed reaches no moment.
  virtual bool is_reached(std::size_t number) const = 0;
  // When the stream reached moment `number`, in ticks of device/host_clock.h. 0 if it has not, or
  // if the device has a clock of its own.
  virtual std::int64_t ticks(std::size_t /*number*/) const { return 0; }

  // How far the host was ahead: the time from marking a moment to `reached`, when the stream
  // reached it. 0 on the host.
  virtual double lead(std::size_t number, double reached) const = 0;

  // Marks moment 0 now, waits for it, and returns its time in seconds of std::chrono::steady_clock,
  // even if the hardware has another clock.
  virtual double anchor() = 0;
};

// A copy of `count` pieces of memory. Each piece lies one step behind the previous one.
struct Move {
  static constexpr int kAllPieces = -1;

  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;  // of a piece; not 0
  int count = 1;
  std::size_t source_step = 0;
  std::size_t destination_step = 0;
  int written_piece = kAllPieces;  // if it is one piece, the others are only read

  constexpr bool writes(int piece) const {
    return written_piece == kAllPieces || written_piece == piece;
  }
};

// Makes the streams, events and buffers of one kind of hardware.
class Device {
 public:
  virtual ~Device() = default;

  // Whether this is the host: the caller blocks when the compute stream waits, and a copy takes
  // time from the work beside it.
  virtual bool is_host() const = 0;
  virtual int index() const { return 0; }

  // The stream that the caller's operators run on. On a GPU it is the framework's current stream,
  // so its native handle may differ from call to call.
  virtual Stream& compute_stream() = 0;
  // The stream with this native handle, which compute_stream() had at an earlier call. The result
  // lives as long as the device.
  virtual Stream& stream_of(void* /*native_handle*/) { return compute_stream(); }

  virtual std::unique_ptr<Stream> new_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> new_event() = 0;

  // For measurements, off the hot path.
  virtual std::unique_ptr<Moments> new_moments() = 0;

  // `bytes` of memory, aligned to at least 64 bytes and freed with its last owner.
  //
  // Note [memory and the compute stream]
  // The allocator orders memory by the compute stream. New memory may still be in use by work that
  // was issued to the compute stream earlier, so another stream waits for the compute stream before
  // it uses new memory. Memory is freed only after the compute stream, or the host, has waited for
  // the work of other streams on it.
  std::shared_ptr<void> allocate(std::size_t bytes) {
    return allocate_for(compute_stream(), bytes);
  }
  // The same, but `stream` takes the place of the compute stream, which it once was.
  virtual std::shared_ptr<void> allocate_for(Stream& stream, std::size_t bytes) = 0;

  // Allocates memory at once, outside the order of streams. The owner waits for all work on the
  // memory before freeing it. Returns null if there is too little.
  using Allocator = std::function<std::shared_ptr<void>(std::size_t bytes)>;
  // Returns a function that allocates memory with the properties of `sample`, but without access
  // for other devices. The function may outlive this object. It is empty if the device cannot make
  // such memory. Do not call this in a step.
  virtual Allocator allocator_like(const void* /*sample*/) { return nullptr; }

  // Host memory that copies to and from the device need not stage. Do not call it in a step.
  virtual std::shared_ptr<void> allocate_on_host(std::size_t bytes) { return allocate(bytes); }

  // Sets `bytes` bytes to `value`, in order of `stream`.
  virtual void fill(Stream& stream, void* data, int value, std::size_t bytes) = 0;

  // Makes this the current device of the calling thread while the result lives. Off the hot path.
  virtual std::shared_ptr<void> make_current() { return nullptr; }

  // Returns a function that makes this the current device of the calling thread, even after this
  // object's end.
  virtual std::function<void()> selector() const {
    return [] {};
  }

  // Returns a function that blocks the calling thread until all work on the device is done, from
  // any source. It may be called after this object's end. Off the hot path.
  virtual std::function<void()> synchronizer() const {
    return [] {};
  }

  // Returns memory that the framework keeps for later allocations to the hardware.
  virtual void free_cached_memory() {}

  // Copies memory of the device or of the host, in order of `stream`. On a GPU the call may block
  // until a copy of memory that is not pinned is done.
  virtual void copy(Stream& stream, const void* source, void* destination, std::size_t bytes) = 0;

  // Acts on `stream` as a network would: keeps it busy for `duration`, and copies memory meanwhile.
  // If the copies take longer, so does the transfer. A stream of the host copies and then sleeps. A
  // GPU occupies `multiprocessors` of its multiprocessors for the whole time; with 0 of them, its
  // copy engines do what they can.
  virtual void transfer(Stream& stream, std::chrono::nanoseconds duration,
                        const std::vector<Move>& moves, int multiprocessors) = 0;

  // For tests of ordering.
  void delay(Stream& stream, std::chrono::microseconds duration) {
    transfer(stream, duration, /*moves=*/{}, /*multiprocessors=*/0);
  }

  // Begin and end a named range of the work that the calling thread issues, for the profilers of
  // the hardware; see Range.
  virtual void push_range(const std::string& /*name*/) {}
  virtual void pop_range() {}

  // Begins a range in the profiler of the framework. It ends when the result is destroyed, on the
  // same thread. Returns null, at little cost, if no profiler records this thread. `bytes` is the
  // size of the message that is issued within the range, or 0.
  using BeginRange = std::shared_ptr<void> (*)(const std::string& name, std::size_t bytes);
  void show_ranges_in(BeginRange framework) { begin_range_ = framework; }
  std::shared_ptr<void> begin_range(const std::string& name, std::size_t bytes) const {
    return begin_range_ == nullptr ? nullptr : begin_range_(name, bytes);
  }

  // Whether the compute stream is being captured into a CUDA graph.
  virtual bool is_capturing() const { return false; }

  // Lets the calling thread, which issues no work, query events while another thread captures.
  virtual void allow_event_queries_during_capture() {}

  // The limit of a single wait.
  virtual std::chrono::milliseconds timeout() const = 0;

 private:
  BeginRange begin_range_ = nullptr;
};

// The name of a range. As in FSDP2, `owner` is the name of a unit or a bucket, and empty for the
// root unit.
inline std::string range_name(const char* what, const std::string& owner) {
  return detail::concat("FSDP::", what) + (owner.empty() ? "" : " (" + owner + ")");
}

// A range in the timelines of profilers, which ends with this object.
class Range {
 public:
  Range(Device& device, const std::string& name, std::size_t bytes = 0)
      : device_(device), of_framework_(device.begin_range(name, bytes)) {
    device_.push_range(name);
  }
  ~Range() { device_.pop_range(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  Device& device_;
  std::shared_ptr<void> of_framework_;
};

// Whether new streams of the host are worker threads, or run work on the calling thread at once.
enum class HostStreams : bool { Threads, Inline };

std::unique_ptr<Device> make_host_device(std::chrono::milliseconds timeout,
                                         HostStreams streams = HostStreams::Threads);

// The parts of the framework that this extension uses on a shared GPU: its current stream, and its
// allocator, so that the framework accounts for our memory. Streams are native handles.
struct CudaFramework {
  void* (*current_stream)(int device) = nullptr;
  std::shared_ptr<void> (*allocate)(int device, std::size_t bytes, void* stream) = nullptr;
  void (*free_cached)() = nullptr;  // may be null
};

// The newest CUDA version that the driver has: 12050 is 12.5. Throws in a build without CUDA.
int cuda_driver_version();

// Throws if there is no such GPU, and in a build without CUDA (no_cuda_stream.cpp).
std::unique_ptr<Device> make_cuda_device(int index, std::chrono::milliseconds timeout,
                                         CudaFramework framework);

}  // namespace fsdp
