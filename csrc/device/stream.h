// Seam 1 of 3: in-order queues of work, the events that order them, and memory.
//
// Note [ordering by events]
// Work on one stream runs in the order of issue. Work on two streams is ordered only where an
// event was recorded on one and waited for on the other. Nothing else orders anything: no host
// synchronisation, no knowledge of how long things take. The host's streams are worker threads,
// so a missing wait is a real race on a machine without a GPU, and ThreadSanitizer sees it.
//
// Note [errors on streams]
// Work that throws puts its stream into a failed state: later work on it is skipped, its events
// complete and carry the error, and a stream that waits for such an event fails with it. Whoever
// blocks on the event (the compute stream of the host, or synchronize) gets the error thrown.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

// A point on a stream. Recording it again moves it; an event never recorded is complete.
class Event {
 public:
  virtual ~Event() = default;

  // Whether the work before the last record is done (or failed).
  virtual bool query() const = 0;

  // Blocks the calling thread until then. `what` names the work in the message of the
  // TimeoutError; throws the stream's error if the work failed.
  virtual void synchronize(std::chrono::milliseconds timeout, const std::string& what) = 0;
};

class Moments;

class Stream {
 public:
  virtual ~Stream() = default;

  virtual const std::string& name() const = 0;

  // `event` completes when all work issued to this stream so far has.
  virtual void record(Event& event) = 0;

  // Work issued to this stream from now on starts only after `event`. On a compute stream of the
  // host, which is the calling thread itself, this blocks. `what` names what is waited for in
  // error messages; it outlives the wait. Returns false where that is known to be the case already.
  virtual bool wait(Event& event, const std::string& what) = 0;

  // The same, and marks moment `number` right before, if this returns true.
  virtual bool wait_from(Moments& moments, std::size_t number, Event& event,
                         const std::string& what);

  // Blocks the calling thread until all issued work is done; throws if any of it failed.
  virtual void synchronize() = 0;

  // The hardware's own handle, for the implementations of the other seams: a cudaStream_t.
  virtual void* native_handle() const { return nullptr; }
};

// Points on streams, by number, and when they were reached.
class Moments {
 public:
  virtual ~Moments() = default;

  // Moment `number` is when `stream` gets here; marking it again moves it. Numbers are used from 0
  // on, without gaps.
  virtual void mark(std::size_t number, Stream& stream) = 0;
  // So many can be marked without making anything.
  virtual void reserve(std::size_t count) = 0;

  // From moment `number` to `later`'s `other`, which may be this. Waits until both are reached.
  virtual double seconds_to(std::size_t number, const Moments& later, std::size_t other) const = 0;
  // How long after the host had marked it the moment was reached; 0 where the host is the stream.
  virtual double lead(std::size_t number, double reached) const = 0;

  // Marks moment 0 now, waits for it, and returns when that was, in seconds of
  // std::chrono::steady_clock, whatever clock the hardware has.
  virtual double anchor() = 0;
};

// Where nobody knows better before, it is marked in any case.
inline bool Stream::wait_from(Moments& moments, std::size_t number, Event& event,
                              const std::string& what) {
  moments.mark(number, *this);
  return wait(event, what);
}

// `count` pieces of memory, each so many bytes behind the one before, to be copied.
struct Move {
  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;  // of a piece; not 0
  int count = 1;
  std::size_t source_step = 0;
  std::size_t destination_step = 0;
  int kept = -1;  // the only piece that is written, while others are read; -1: all are
};

// Makes the streams, events and buffers of one kind of hardware.
class Device {
 public:
  virtual ~Device() = default;

  virtual const char* name() const = 0;  // "cpu", "cuda"
  virtual int index() const { return 0; }

  // The stream that the caller's own operators run on.
  virtual Stream& compute_stream() = 0;

  virtual std::unique_ptr<Stream> new_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> new_event() = 0;

  // For measurements; off the hot path.
  virtual std::unique_ptr<Moments> new_moments() = 0;

  // `bytes` of memory, aligned to at least 64 bytes, freed when the last owner lets go.
  //
  // Note [memory and the compute stream]
  // Memory comes from, and goes back to, what the compute stream works with. So work that was
  // issued to the compute stream before may still use new memory: another stream waits for the
  // compute stream before it touches it. And memory goes back when the compute stream, or the host,
  // has waited for what other streams do with it.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  // Sets `bytes` bytes to `value`, in order of `stream`.
  virtual void fill(Stream& stream, void* data, int value, std::size_t bytes) = 0;

  // Makes it the calling thread's current device, until what is returned goes; off the hot path.
  virtual std::shared_ptr<void> make_current() { return nullptr; }

  // Blocks the calling thread until nothing runs any more, whoever issued it; off the hot path.
  virtual void synchronize() {}

  // Bytes from and to the host's memory, in order of `stream`, off the hot path. The host's side
  // is read or written by the time that the stream gets past this point.
  virtual void copy_to_host(Stream& stream, const void* data, void* host, std::size_t bytes) = 0;
  virtual void copy_from_host(Stream& stream, const void* host, void* data, std::size_t bytes) = 0;

  // Keeps `stream` busy for `duration`, in order, and moves memory meanwhile, as a network would do
  // (if moving takes longer, so does it). The host's streams sleep when all is moved. On a GPU
  // `multiprocessors` of them are taken for as long, or none: then copy engines do what they can.
  virtual void transfer(Stream& stream, std::chrono::nanoseconds duration,
                        const std::vector<Move>& moves, int multiprocessors) = 0;

  // For tests of ordering.
  void delay(Stream& stream, std::chrono::microseconds duration) {
    transfer(stream, duration, {}, 0);
  }

  // A named range of what the calling thread issues, for profilers; see Range.
  virtual void push_range(const std::string& /*name*/) {}
  virtual void pop_range() {}

  // Whether the compute stream is being captured into a CUDA graph.
  virtual bool is_capturing() const { return false; }

  // The calling thread issues nothing and only looks at events.
  virtual void this_thread_only_watches() {}

  // How long any one wait may take.
  virtual std::chrono::milliseconds timeout() const = 0;
};

// A range of a profiler's timeline, as long as this lives.
class Range {
 public:
  Range(Device& device, const std::string& name) : device_(device) { device_.push_range(name); }
  ~Range() { device_.pop_range(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  Device& device_;
};

std::unique_ptr<Device> make_host_device(std::chrono::milliseconds timeout);

// What the framework that shares the GPU brings: its current stream, and its allocator, so that our
// memory is in its books.
struct CudaFramework {
  void* (*current_stream)(int device) = nullptr;
  std::shared_ptr<void> (*allocate)(int device, std::size_t bytes) = nullptr;
};

// Throws where there is no such GPU; in a build without CUDA it says how to get one (no_cuda_stream.cpp).
std::unique_ptr<Device> make_cuda_device(int index, std::chrono::milliseconds timeout,
                                         CudaFramework framework);

}  // namespace fsdp
