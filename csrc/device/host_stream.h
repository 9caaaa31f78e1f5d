// Streams of the host: worker threads with in-order queues. The compute stream is the calling
// thread itself. Only host implementations (pack_host, the host's transports) include this.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/forks.h"
#include "device/stream.h"

namespace fsdp {

// Note [published waits]
// A stream may publish the number of the thread that is blocked until the stream is done. The
// number is published only while that thread waits for a record that the stream has not reached.
// The worker removes it when it reaches the record. The thread itself would do so only after
// waking, which may be much later on a busy host. If several threads wait, a number may be missing.
// Waits that end while polling publish nothing. Other processes may read the number.
using BlockedThread = std::atomic<std::uint64_t>;

// A number of the calling thread, unique among the living threads of the process. Larger than 1.
std::uint64_t this_thread();

// Whether the stream has reached one record of an event, and the error of the work before it.
class Completion {
 public:
  // The waits of hosts are published in `blocked`, if it is not null: Note [published waits].
  explicit Completion(BlockedThread* blocked) : blocked_(blocked) {}

  bool is_complete() const { return complete_.load(std::memory_order_acquire); }
  bool is_success() const { return is_complete() && !error_; }
  // Whether the waiting thread issues work, or is the worker of a stream.
  enum class Waiter : bool { Host, Worker };

  void complete(std::exception_ptr error);
  // Throws the error of the work, or a TimeoutError that names `what`. Also throws in a forked
  // child, which lacks the worker that would complete this.
  void wait(std::chrono::milliseconds timeout, const std::string& what, Waiter waiter);

 private:
  void publish(std::uint64_t thread);

  BlockedThread* blocked_;
  std::mutex mutex_;
  std::condition_variable completed_;
  std::atomic<bool> complete_{false};
  std::exception_ptr error_;   // written only before complete_ is set
  bool is_published_ = false;  // guarded by mutex_
  ForkGuard forks_;
};

// Note [one completion a record]
// Every record has its own Completion. A wait refers to the newest one at the time of its issue. So
// recording the event again, on this or another stream, neither releases nor delays earlier waits.
// The event may be destroyed while records and waits are still in queues.
class HostEvent final : public Event {
 public:
  bool query() const override;
  void synchronize(std::chrono::milliseconds timeout, const std::string& what) override;

  // For streams only. nullptr stands for a record that is already reached.
  void set_newest(std::shared_ptr<Completion> completion);
  // The newest record, which waits are for. Null if the stream has reached it.
  std::shared_ptr<Completion> pending() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> newest_;
};

// When the worker reached a point: ticks of device/host_clock.h, negative if the stream has failed.
using Stamp = std::atomic<std::int64_t>;

// A stream of the host accepts any callable as work.
class HostQueue : public Stream {
 public:
  virtual void enqueue(std::function<void()> work) = 0;
  // Stores the time at which the stream reaches the next queued item, negated if the stream has
  // failed. Almost free.
  virtual void stamp(Stamp& at) = 0;
  // From the next record on, waits are published in `blocked`, which outlives the stream.
  virtual void publish_waits(BlockedThread& /*blocked*/) {}
};

// Work runs at once on the calling thread, and a wait blocks. Only one thread may use it at a time.
class InlineStream final : public HostQueue {
 public:
  // Thrown: the caller gets the error, as on the compute stream. Kept: the stream has failed, as a
  // worker's does (Note [errors on streams]).
  enum class Errors : bool { Thrown, Kept };

  explicit InlineStream(std::chrono::milliseconds timeout, std::string name = "compute",
                        Errors errors = Errors::Thrown)
      : timeout_(timeout), name_(std::move(name)), errors_(errors) {}

  const std::string& name() const override { return name_; }
  void record(Event& event) override;
  bool wait(Event& event, const std::string& what) override;
  void synchronize() override;
  void enqueue(std::function<void()> work) override;
  void stamp(Stamp& at) override;

 private:
  template <typename Work>
  void run(const Work& work);

  std::chrono::milliseconds timeout_;
  std::string name_;
  Errors errors_;
  std::exception_ptr error_;
};

// A worker thread. The destructor finishes all issued work and joins the thread. In a forked child
// every call throws, and a stream of the parent must not be destroyed: Note [forks].
//
// Note [doorbell]
// Waking the worker costs more than most of its work. So enqueue and wait only queue their items,
// and a record rings: every sequence of work that will be waited for ends with a record. A worker
// without work polls for the next ring for a moment, and yields its core meanwhile, before it
// sleeps. Ringing a worker that polls costs the caller no system call.
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
  void publish_waits(BlockedThread& blocked) override { blocked_ = &blocked; }

 private:
  // The number of stamps that one item can carry. Further stamps get an empty item of their own.
  // Between two collectives, the ledger and a flight tape each mark one end and one begin.
  static constexpr int kStamps = 4;

  // Work, a record, a wait, or nothing. The stamps are written before it.
  struct Item {
    std::function<void()> work;
    std::shared_ptr<Completion> record;
    std::shared_ptr<Completion> wait;
    Stamp* stamps[kStamps] = {};
    const std::string* what = nullptr;  // names the wait; the caller's, and outlives it
  };

  enum class Ring : bool { No, Yes };

  void push(Item&& item, Ring ring);
  void run();
  bool wait_for_batch(std::vector<Item>& batch);
  void execute(Item item);
  void run_item(Item& item);

  std::string name_;
  std::chrono::milliseconds timeout_;
  BlockedThread* blocked_ = nullptr;
  ForkGuard forks_;
  std::mutex mutex_;
  std::condition_variable work_available_;
  std::vector<Item> items_;  // swapped with the worker's, so that both keep their memory
  std::atomic<Stamp*> next_stamps_[kStamps] = {};  // for the next item
  std::atomic<bool> rung_{false};  // since the worker last emptied the queue; set under mutex_
  bool asleep_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;  // only the worker uses it
  std::thread worker_;        // last, because it uses the members above
};

}  // namespace fsdp
