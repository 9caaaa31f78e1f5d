// Streams of the host: worker threads with in-order queues, and the calling thread itself as the
// compute stream. Only host implementations (pack_host, the host transports) include this.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "device/stream.h"

namespace fsdp {

// Lives until no stream has it recorded or waited for any more.
class HostEvent final : public Event {
 public:
  bool query() const override;
  void synchronize(std::chrono::milliseconds timeout, const std::string& what) override;

  // For streams only. A record takes the next ticket; completing a ticket completes all earlier
  // ones. Waiters wait for the ticket that was the newest when they were issued.
  std::uint64_t take_ticket();
  std::uint64_t newest_ticket() const;
  bool is_complete(std::uint64_t ticket) const;
  void complete(std::uint64_t ticket, std::exception_ptr error);
  void wait_for(std::uint64_t ticket, std::chrono::milliseconds timeout, const std::string& what);

 private:
  mutable std::mutex mutex_;
  std::condition_variable completed_changed_;
  std::uint64_t recorded_ = 0;
  std::uint64_t completed_ = 0;
  std::exception_ptr error_;
};

// A stream of the host takes any callable.
class HostQueue : public Stream {
 public:
  virtual void enqueue(std::function<void()> work) = 0;
};

// The calling thread: work runs at once, waiting blocks.
class HostComputeStream final : public HostQueue {
 public:
  explicit HostComputeStream(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  const std::string& name() const override { return name_; }
  void record(Event& event) override;
  void wait(Event& event, const std::string& what) override;
  void synchronize() override {}
  void enqueue(std::function<void()> work) override { work(); }

 private:
  std::string name_ = "compute";
  std::chrono::milliseconds timeout_;
};

// A worker thread. Destruction finishes what was issued, then joins.
//
// Note [doorbell]
// Waking the worker costs more than most of what it does. So enqueue and wait only queue, and a
// record, with which every sequence of work ends that somebody will wait for, wakes it.
class HostStream final : public HostQueue {
 public:
  HostStream(std::string name, std::chrono::milliseconds timeout);
  ~HostStream() override;

  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  const std::string& name() const override { return name_; }
  void record(Event& event) override;
  void wait(Event& event, const std::string& what) override;
  void synchronize() override;
  void enqueue(std::function<void()> work) override;

 private:
  struct Item {
    std::function<void()> work;  // empty for a marker
    HostEvent* record = nullptr;
    HostEvent* wait = nullptr;
    std::uint64_t ticket = 0;
    const std::string* what = nullptr;  // the caller's, which outlives the wait
  };

  void push(Item item, bool ring);
  void run();
  void execute(Item& item);

  std::string name_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable work_available_;
  std::deque<Item> items_;
  bool rung_ = false;  // since the queue was last empty
  bool sleeping_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;  // only the worker touches it
  std::thread worker_;        // last: starts when everything above exists
};

}  // namespace fsdp
