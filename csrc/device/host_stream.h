// Streams of the host: worker threads with in-order queues, and the calling thread itself as the
// compute stream. Only host implementations (pack_host, the host transports) include this.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device/stream.h"

namespace fsdp {

// Whether one record of an event is reached, and the error of the work before it.
class Completion {
 public:
  bool is_complete() const { return complete_.load(std::memory_order_acquire); }
  bool is_success() const { return is_complete() && !error_; }
  void complete(std::exception_ptr error);
  // Throws the error, or a TimeoutError that names `what`.
  void wait(std::chrono::milliseconds timeout, const std::string& what);

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  std::atomic<bool> complete_{false};
  std::exception_ptr error_;  // written before complete_ is set, not after
};

// Note [one completion a record]
// Every record has its own Completion. A waiter takes the newest when its wait is issued, and
// keeps it: recording the event again, be it on another stream, neither releases nor delays it,
// and the event may be destroyed while streams have it recorded or waited for.
class HostEvent final : public Event {
 public:
  bool query() const override;
  void synchronize(std::chrono::milliseconds timeout, const std::string& what) override;

  // For streams only. nullptr stands for a record that was reached when it was made.
  void set_newest(std::shared_ptr<Completion> completion);
  std::shared_ptr<Completion> newest() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> newest_;
};

// When the worker came by: ticks of device/host_clock.h.
using Stamp = std::atomic<std::int64_t>;

// A stream of the host takes any callable.
class HostQueue : public Stream {
 public:
  virtual void enqueue(std::function<void()> work) = 0;
  // Writes the time down, in order, when the stream comes to what is queued next. Almost free.
  virtual void stamp(Stamp& at) = 0;
};

// The calling thread: work runs at once, waiting blocks.
class HostComputeStream final : public HostQueue {
 public:
  explicit HostComputeStream(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  const std::string& name() const override { return name_; }
  void record(Event& event) override;
  bool wait(Event& event, const std::string& what) override;
  bool wait_from(Moments& moments, std::size_t number, Event& event,
                 const std::string& what) override;
  void synchronize() override {}
  void enqueue(std::function<void()> work) override { work(); }
  void stamp(Stamp& at) override;

 private:
  std::string name_ = "compute";
  std::chrono::milliseconds timeout_;
};

// A worker thread. Destruction finishes what was issued, then joins.
//
// Note [doorbell]
// Waking the worker costs more than most of what it does. So enqueue and wait only queue, and a
// record, with which every sequence of work ends that somebody will wait for, rings. And a worker
// with nothing left to do looks out for the next ring for a moment, giving its core to whoever
// wants it, before it sleeps: a ring it sees costs the caller no call into the kernel.
class HostStream final : public HostQueue {
 public:
  HostStream(std::string name, std::chrono::milliseconds timeout);
  ~HostStream() override;

  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  const std::string& name() const override { return name_; }
  void record(Event& event) override;
  bool wait(Event& event, const std::string& what) override;
  void synchronize() override;
  void enqueue(std::function<void()> work) override;
  void stamp(Stamp& at) override;

 private:
  // At most so many stamps come with what is queued next; more are queued by themselves.
  static constexpr int kStamps = 2;

  // Work, or else a record, a wait, or nothing. Stamps come before it.
  struct Item {
    std::function<void()> work;
    std::shared_ptr<Completion> record;
    std::shared_ptr<Completion> wait;
    Stamp* stamps[kStamps] = {};
    const std::string* what = nullptr;  // the caller's, which outlives the wait
  };

  void push(Item item, bool ring);
  void run();
  bool take_batch(std::deque<Item>& batch);
  void execute(Item item);
  void run_item(Item& item);

  std::string name_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable work_available_;
  std::deque<Item> items_;
  std::atomic<Stamp*> next_stamps_[kStamps] = {};  // of the caller, for the next item
  std::atomic<bool> rung_{false};  // since the worker last took what was queued; set under mutex_
  bool asleep_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;  // only the worker touches it
  std::thread worker_;        // last: starts when everything above exists
};

}  // namespace fsdp
