#include "device/host_stream.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

// See Note [doorbell]. About the time between two collectives of the smallest units.
constexpr std::chrono::microseconds kWorkerPolling{100};
// Waking a waiter that sleeps takes about ten microseconds.
constexpr std::chrono::microseconds kWaiterPolling{20};

// The upper limit of a wait: longer times would overflow.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);

// Yields the core to other threads meanwhile.
template <typename Condition>
void poll_until(const Condition& condition, std::chrono::microseconds longest) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition() && std::chrono::steady_clock::now() - start < longest) {
    std::this_thread::yield();
  }
}

HostEvent& as_host(Event& event) { return static_cast<HostEvent&>(event); }

void copy_pieces(const Move& move) {
  for (int piece = 0; piece < move.count; ++piece) {
    if (move.writes(piece)) {
      const auto at = static_cast<std::size_t>(piece);
      std::memcpy(static_cast<char*>(move.destination) + at * move.destination_step,
                  static_cast<const char*>(move.source) + at * move.source_step, move.bytes);
    }
  }
}

// A thread wakes about 30 us after the time that it asked for. So this asks for a wake-up earlier
// by the shortest recent delay, and yields the core for the rest.
void sleep_until(std::chrono::steady_clock::time_point time) {
  using Clock = std::chrono::steady_clock;
  constexpr Clock::duration kLongestDelay = std::chrono::microseconds(100);
  thread_local Clock::duration least_delay{0};  // follows longer delays slowly
  const auto asked = time - least_delay;
  if (asked > Clock::now()) {
    // By default the kernel lets a thread sleep 50 us longer, to wake several threads at once.
    const int slack = ::prctl(PR_GET_TIMERSLACK);
    ::prctl(PR_SET_TIMERSLACK, 1UL);
    std::this_thread::sleep_until(asked);
    ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(std::max(slack, 1)));
    const auto delay = std::min(kLongestDelay, Clock::now() - asked);
    least_delay = delay < least_delay ? delay : least_delay + (delay - least_delay) / 8;
  }
  while (Clock::now() < time) {
    std::this_thread::yield();
  }
}

void stamp_now(Stamp& at, bool has_failed = false) {
  const std::int64_t now = host_clock::now();
  at.store(has_failed ? -now : now, std::memory_order_relaxed);
}

class HostMoments final : public Moments {
 public:
  void mark(std::size_t number, Stream& stream) override {
    reserve(number + 1);
    Stamp& stamp = stamp_of(number);
    stamp.store(0, std::memory_order_relaxed);
    static_cast<HostQueue&>(stream).stamp(stamp);
  }
  void reserve(std::size_t count) override {
    while (chunks_.size() * kChunk < count) {
      chunks_.push_back(std::make_unique<Stamp[]>(kChunk));
    }
  }

  double seconds_to(std::size_t number, const Moments& later, std::size_t other) const override {
    return static_cast<const HostMoments&>(later).seconds(other) - seconds(number);
  }
  bool is_reached(std::size_t number) const override { return ticks(number) != 0; }
  std::int64_t ticks(std::size_t number) const override {
    return std::max<std::int64_t>(0, stamp_of(number).load(std::memory_order_relaxed));
  }
  double lead(std::size_t /*number*/, double /*reached*/) const override { return 0.0; }
  double anchor() override {
    reserve(1);
    stamp_now(stamp_of(0));
    return seconds(0);
  }

 private:
  static constexpr std::size_t kChunk = 1024;

  Stamp& stamp_of(std::size_t number) const { return chunks_[number / kChunk][number % kChunk]; }
  // Also works for a failed stream, whose stamps are negative.
  double seconds(std::size_t number) const {
    return host_clock::seconds(std::abs(stamp_of(number).load(std::memory_order_relaxed)));
  }

  std::vector<std::unique_ptr<Stamp[]>> chunks_;  // a stamp never moves
};

class HostDevice final : public Device {
 public:
  HostDevice(std::chrono::milliseconds timeout, HostStreams streams)
      : timeout_(timeout), streams_(streams), compute_(timeout) {}

  bool is_host() const override { return true; }
  Stream& compute_stream() override { return compute_; }

  std::unique_ptr<Stream> new_stream(const std::string& name) override {
    if (streams_ == HostStreams::Inline) {
      return std::make_unique<InlineStream>(timeout_, name, InlineStream::Errors::Kept);
    }
    return std::make_unique<HostStream>(name, timeout_);
  }

  std::unique_ptr<Event> new_event() override { return std::make_unique<HostEvent>(); }

  std::unique_ptr<Moments> new_moments() override { return std::make_unique<HostMoments>(); }

  std::shared_ptr<void> allocate_for(Stream& /*stream*/, std::size_t bytes) override {
    constexpr std::size_t kCacheLine = 64;
    const std::size_t rounded = (bytes / kCacheLine + 1) * kCacheLine;
    void* memory = rounded > bytes ? std::aligned_alloc(kCacheLine, rounded) : nullptr;
    if (memory == nullptr) {
      throw OutOfMemory(detail::concat("The host has too little memory to allocate ", bytes,
                                       " bytes. Use more ranks or smaller units."));
    }
    return {memory, &std::free};
  }

  void fill(Stream& stream, void* data, int value, std::size_t bytes) override {
    static_cast<HostQueue&>(stream).enqueue([=] { std::memset(data, value, bytes); });
  }

  void copy(Stream& stream, const void* source, void* destination, std::size_t bytes) override {
    static_cast<HostQueue&>(stream).enqueue([=] { std::memcpy(destination, source, bytes); });
  }

  void transfer(Stream& stream, std::chrono::nanoseconds duration, const std::vector<Move>& moves,
                int /*multiprocessors*/) override {
    static_cast<HostQueue&>(stream).enqueue([=] {
      const auto start = std::chrono::steady_clock::now();
      for (const Move& move : moves) {
        copy_pieces(move);
      }
      sleep_until(start + duration);
    });
  }

  std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  std::chrono::milliseconds timeout_;
  HostStreams streams_;
  InlineStream compute_;
};

}  // namespace

std::uint64_t this_thread() { return static_cast<std::uint64_t>(::pthread_self()); }

// - Completion

void Completion::publish(std::uint64_t thread) {
  if (blocked_ != nullptr) {
    blocked_->store(thread, std::memory_order_release);
    is_published_ = thread != 0;
  }
}

void Completion::complete(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    complete_.store(true, std::memory_order_release);
    if (is_published_) {
      publish(0);
    }
  }
  completed_.notify_all();
}

void Completion::wait(std::chrono::milliseconds timeout, const std::string& what, Waiter waiter) {
  poll_until([this] { return is_complete(); }, kWaiterPolling);
  if (!is_complete()) {
    forks_.check();
    std::unique_lock<std::mutex> lock(mutex_);
    if (waiter == Waiter::Host && !is_complete()) {
      publish(this_thread());
    }
    if (!completed_.wait_for(lock, std::min(timeout, kLongest), [&] { return is_complete(); })) {
      publish(0);
      throw_timeout(timeout, what);
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

// - HostEvent

void HostEvent::set_newest(std::shared_ptr<Completion> completion) {
  const std::lock_guard<std::mutex> lock(mutex_);
  newest_ = std::move(completion);
}

std::shared_ptr<Completion> HostEvent::pending() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return newest_ == nullptr || newest_->is_success() ? nullptr : newest_;
}

bool HostEvent::query() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return newest_ == nullptr || newest_->is_complete();
}

void HostEvent::synchronize(std::chrono::milliseconds timeout, const std::string& what) {
  if (const auto completion = pending()) {
    completion->wait(timeout, what, Completion::Waiter::Host);
  }
}

// - InlineStream

template <typename Work>
void InlineStream::run(const Work& work) {
  if (error_) {
    return;
  }
  try {
    work();
  } catch (...) {
    if (errors_ == Errors::Thrown) {
      throw;
    }
    error_ = std::current_exception();
  }
}

void InlineStream::enqueue(std::function<void()> work) { run(work); }

void InlineStream::stamp(Stamp& at) { stamp_now(at, error_ != nullptr); }

void InlineStream::record(Event& event) {
  std::shared_ptr<Completion> failed;
  if (error_) {
    failed = std::make_shared<Completion>(nullptr);
    failed->complete(error_);
  }
  as_host(event).set_newest(std::move(failed));
}

bool InlineStream::wait(Event& event, const std::string& what) {
  const std::shared_ptr<Completion> completion = as_host(event).pending();
  if (completion == nullptr) {
    return false;
  }
  run([&] { completion->wait(timeout_, what, Completion::Waiter::Host); });
  return true;
}

void InlineStream::synchronize() {
  if (error_) {
    std::rethrow_exception(error_);
  }
}

// - HostStream

HostStream::HostStream(std::string name, std::chrono::milliseconds timeout)
    : name_(std::move(name)), timeout_(timeout), worker_([this] { run(); }) {
  pthread_setname_np(worker_.native_handle(), ("fsdp:" + name_).substr(0, 15).c_str());
}

HostStream::~HostStream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = rung_ = true;
  }
  work_available_.notify_one();
  worker_.join();
}

void HostStream::enqueue(std::function<void()> work) {
  Item item;
  item.work = std::move(work);
  push(std::move(item), Ring::No);
}

void HostStream::stamp(Stamp& at) {
  for (std::atomic<Stamp*>& next : next_stamps_) {
    if (next.load(std::memory_order_relaxed) == nullptr) {
      next.store(&at, std::memory_order_relaxed);
      return;
    }
  }
  push({}, Ring::No);
  next_stamps_[0].store(&at, std::memory_order_relaxed);
}

void HostStream::record(Event& event) {
  forks_.check();
  Item item;
  item.record = std::make_shared<Completion>(blocked_);
  as_host(event).set_newest(item.record);
  push(std::move(item), Ring::Yes);
}

bool HostStream::wait(Event& event, const std::string& what) {
  std::shared_ptr<Completion> completion = as_host(event).pending();
  if (completion == nullptr) {
    return false;
  }
  Item item;
  item.wait = std::move(completion);
  item.what = &what;
  push(std::move(item), Ring::No);
  return true;
}

void HostStream::synchronize() {
  HostEvent done;
  record(done);
  done.synchronize(timeout_, "stream '" + name_ + "'");
}

void HostStream::push(Item&& item, Ring ring) {
  forks_.check();
  for (int i = 0; i < kStamps; ++i) {
    item.stamps[i] = next_stamps_[i].load(std::memory_order_relaxed);
    if (item.stamps[i] == nullptr) {
      break;
    }
    next_stamps_[i].store(nullptr, std::memory_order_relaxed);
  }
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    if (ring == Ring::Yes) {
      wake = asleep_ && !rung_;
      rung_ = true;
    }
  }
  if (wake) {
    work_available_.notify_one();
  }
}

void HostStream::run() {
  std::vector<Item> batch;
  while (wait_for_batch(batch)) {
    for (Item& item : batch) {
      execute(std::move(item));
    }
    batch.clear();
  }
}

// Waits for a ring and moves all queued items to `batch`. Returns false at the end of the stream.
bool HostStream::wait_for_batch(std::vector<Item>& batch) {
  poll_until([this] { return rung_.load(std::memory_order_acquire); }, kWorkerPolling);
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_ = true;
  // Not wait(): since gcc 12 it needs a libstdc++ that is newer than RHEL 9's.
  while (!work_available_.wait_for(lock, kLongest, [this] { return rung_ || stopping_; })) {
  }
  asleep_ = false;
  rung_ = false;
  batch.swap(items_);
  return !batch.empty();
}

// Takes the item by value. So the work's captures are destroyed before the next record completes,
// and outside the queue's lock, which a destructor may need.
void HostStream::execute(Item item) {
  for (Stamp* stamp : item.stamps) {
    if (stamp != nullptr) {
      stamp_now(*stamp, error_ != nullptr);
    }
  }
  if (item.record != nullptr) {
    item.record->complete(error_);
  } else {
    run_item(item);
  }
}

// See Note [errors on streams].
void HostStream::run_item(Item& item) {
  if (error_) {
    return;
  }
  try {
    if (item.wait != nullptr) {
      item.wait->wait(timeout_, *item.what, Completion::Waiter::Worker);
    } else if (item.work) {
      item.work();
    }
  } catch (...) {
    error_ = std::current_exception();
  }
}

std::unique_ptr<Device> make_host_device(std::chrono::milliseconds timeout, HostStreams streams) {
  return std::make_unique<HostDevice>(timeout, streams);
}

}  // namespace fsdp
