#include "device/host_stream.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

HostEvent& as_host(Event& event) { return static_cast<HostEvent&>(event); }

class HostDevice final : public Device {
 public:
  explicit HostDevice(std::chrono::milliseconds timeout) : timeout_(timeout), compute_(timeout) {}

  const char* name() const override { return "cpu"; }
  Stream& compute_stream() override { return compute_; }

  std::unique_ptr<Stream> new_stream(const std::string& name) override {
    return std::make_unique<HostStream>(name, timeout_);
  }

  std::unique_ptr<Event> new_event() override { return std::make_unique<HostEvent>(); }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    constexpr std::size_t kCacheLine = 64;
    const std::size_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    void* memory = std::aligned_alloc(kCacheLine, rounded == 0 ? kCacheLine : rounded);
    if (memory == nullptr) {
      throw Error(detail::concat("expects ", bytes, " bytes of host memory but there are fewer"));
    }
    return {memory, &std::free};
  }

  void fill(Stream& stream, void* data, int value, std::size_t bytes) override {
    static_cast<HostQueue&>(stream).enqueue([=] { std::memset(data, value, bytes); });
  }

  void delay(Stream& stream, std::chrono::microseconds duration) override {
    static_cast<HostQueue&>(stream).enqueue([=] { std::this_thread::sleep_for(duration); });
  }

  std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  std::chrono::milliseconds timeout_;
  HostComputeStream compute_;
};

}  // namespace

// - HostEvent

std::uint64_t HostEvent::take_ticket() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++recorded_;
}

std::uint64_t HostEvent::newest_ticket() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

bool HostEvent::is_complete(std::uint64_t ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= ticket && !error_;
}

void HostEvent::complete(std::uint64_t ticket, std::exception_ptr error) {
  // Notified under the lock: whoever is woken may destroy the event.
  const std::lock_guard<std::mutex> lock(mutex_);
  completed_ = ticket;
  error_ = std::move(error);
  completed_changed_.notify_all();
}

void HostEvent::wait_for(std::uint64_t ticket, std::chrono::milliseconds timeout,
                         const std::string& what) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!completed_changed_.wait_for(lock, timeout, [&] { return completed_ >= ticket; })) {
    throw TimeoutError(detail::concat("waited ", timeout.count(), " ms for ", what,
                                      ", which has not finished; a rank that failed, or runs "
                                      "something else, never takes part"));
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

bool HostEvent::query() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= recorded_;
}

void HostEvent::synchronize(std::chrono::milliseconds timeout, const std::string& what) {
  wait_for(newest_ticket(), timeout, what);
}

// - HostComputeStream

void HostComputeStream::record(Event& event) {
  HostEvent& host_event = as_host(event);
  host_event.complete(host_event.take_ticket(), nullptr);
}

void HostComputeStream::wait(Event& event, const std::string& what) {
  event.synchronize(timeout_, what);
}

// - HostStream

HostStream::HostStream(std::string name, std::chrono::milliseconds timeout)
    : name_(std::move(name)), timeout_(timeout), worker_([this] { run(); }) {
  pthread_setname_np(worker_.native_handle(), ("fsdp:" + name_).substr(0, 15).c_str());
}

HostStream::~HostStream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_one();
  worker_.join();
}

void HostStream::enqueue(std::function<void()> work) {
  Item item;
  item.work = std::move(work);
  push(std::move(item), /*ring=*/false);
}

void HostStream::record(Event& event) {
  Item item;
  item.record = &as_host(event);
  item.ticket = item.record->take_ticket();
  push(std::move(item), /*ring=*/true);
}

void HostStream::wait(Event& event, const std::string& what) {
  HostEvent& host_event = as_host(event);
  const std::uint64_t ticket = host_event.newest_ticket();
  if (host_event.is_complete(ticket)) {
    return;
  }
  Item item;
  item.wait = &host_event;
  item.ticket = ticket;
  item.what = &what;
  push(std::move(item), /*ring=*/false);
}

void HostStream::synchronize() {
  HostEvent done;
  record(done);
  done.synchronize(timeout_, "stream '" + name_ + "'");
}

void HostStream::push(Item item, bool ring) {
  bool wake;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    rung_ = rung_ || ring;
    wake = ring && sleeping_;
  }
  if (wake) {
    work_available_.notify_one();
  }
}

void HostStream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    while (!rung_ && !stopping_) {
      sleeping_ = true;
      work_available_.wait(lock);
      sleeping_ = false;
    }
    if (items_.empty()) {
      if (stopping_) {
        return;
      }
      rung_ = false;
      continue;
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    lock.unlock();
    execute(item);
    lock.lock();
  }
}

// See Note [errors on streams].
void HostStream::execute(Item& item) {
  if (item.record != nullptr) {
    item.record->complete(item.ticket, error_);
    return;
  }
  if (error_) {
    return;
  }
  try {
    if (item.wait != nullptr) {
      item.wait->wait_for(item.ticket, timeout_, *item.what);
    } else {
      item.work();
    }
  } catch (...) {
    error_ = std::current_exception();
  }
}

std::unique_ptr<Device> make_host_device(std::chrono::milliseconds timeout) {
  return std::make_unique<HostDevice>(timeout);
}

}  // namespace fsdp
