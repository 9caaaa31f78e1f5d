#include "comm/nccl/nccl_watchdog.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/check.h"
#include "comm/nccl/nccl_calls.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongestPollInterval = std::chrono::milliseconds(500);
// How long ending a communicator may keep the thread that ends it.
constexpr auto kLongestEnd = std::chrono::milliseconds(5000);

}  // namespace

NcclWatchdog::NcclWatchdog(const nccl::Api& api, Device& device, nccl::Comm comm,
                           const NcclOptions& options, std::string name)
    : api_(api),
      device_(device),
      comm_(comm),
      options_(options),
      name_(std::move(name)),
      thread_([this] { run(); }) {}

NcclWatchdog::~NcclWatchdog() { stop(); }

void NcclWatchdog::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

NcclWatchdog::BlockingCall::BlockingCall(NcclWatchdog& watchdog, const std::string& what)
    : watchdog_(watchdog) {
  const std::lock_guard<std::mutex> lock(watchdog_.mutex_);
  watchdog_.call_ = what;
  watchdog_.call_since_ = Clock::now();
  watchdog_.in_call_ = true;
}

NcclWatchdog::BlockingCall::~BlockingCall() {
  const std::lock_guard<std::mutex> lock(watchdog_.mutex_);
  watchdog_.in_call_ = false;
}

void NcclWatchdog::watch_collective(Stream& stream, const std::string& what) {
  if (device_.is_capturing()) {  // it runs when the user replays the graph
    captured_ = true;
    return;
  }
  Outstanding* next = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    issued_ += 1;
    next = &outstanding_[issued_ % outstanding_.size()];
    next->pending = false;
  }
  // Without the lock, which the watchdog needs: CUDA blocks here while the stream's queue is full.
  if (next->event == nullptr) {
    next->event = device_.new_event();
  }
  stream.record(*next->event);
  const std::lock_guard<std::mutex> lock(mutex_);
  Outstanding& newest = *next;
  newest.what = what;
  newest.since = Clock::now();
  newest.pending = true;
}

void NcclWatchdog::set_flight_writer(std::function<std::string()> write) {
  const std::lock_guard<std::mutex> lock(mutex_);
  write_flights_ = std::move(write);
}

std::string NcclWatchdog::with_flight_record(const std::string& reason) {
  std::function<std::string()> write;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    write = write_flights_;
  }
  const std::string where = write != nullptr ? write() : "";
  return where.empty() ? reason : reason + " " + where;
}

// Returns whether this is the first failure.
bool NcclWatchdog::fail(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) {
      return false;
    }
    error_ = reason;
    failed_ = true;
  }
  if (options_.other_lane != nullptr) {
    options_.other_lane->fail(reason);
  }
  return true;
}

void NcclWatchdog::abort(const std::string& reason) {
  if (fail(reason)) {
    revoke();
  }
}

// Revoking ends running kernels but, unlike aborting, frees nothing that another thread may be
// about to use. A revoked communicator stays until the process ends, which should be soon.
void NcclWatchdog::revoke() {
  const std::shared_future<nccl::Result> revoked =
      nccl::call_apart(nccl::selector_of(device_), [&api = api_, comm = comm_] {
        return api.CommRevoke(comm, /*flags=*/0);
      }).share();
  std::unique_lock<std::mutex> lock(mutex_);
  revoked_ = revoked;
  lock.unlock();
  revoked.wait_for(std::min(kLongestEnd, options_.timeout));
  lock.lock();
  const bool has_to_abort = take_abort(/*a_call_blocks=*/false);
  lock.unlock();
  if (has_to_abort) {
    abort_communicator();
  }
}

// Returns whether the communicator has to be aborted after it was revoked. It returns true only
// once. The caller holds the lock.
bool NcclWatchdog::take_abort(bool a_call_blocks) {
  if (!revoked_.valid() ||
      revoked_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    return false;
  }
  if (revoked_.get() == nccl::kSuccess && !a_call_blocks) {
    return false;
  }
  revoked_ = {};
  return true;
}

// Aborting blocks until no CUDA graph holds the communicator.
void NcclWatchdog::abort_communicator() {
  const auto done = nccl::call_apart(nccl::selector_of(device_),
                                     [&api = api_, comm = comm_] { return api.CommAbort(comm); });
  done.wait_for(captured_ ? std::chrono::milliseconds(0) : kLongestEnd);
}

std::string NcclWatchdog::error() {
  if (!failed_) {
    return "";
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void NcclWatchdog::run() {
  try {
    device_.allow_event_queries_during_capture();
    const auto interval = std::min<Clock::duration>(kLongestPollInterval, options_.timeout / 10);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_.wait_for(lock, interval, [this] { return stopping_; })) {
      if (take_abort(in_call_)) {
        lock.unlock();
        abort_communicator();
        lock.lock();
        continue;
      }
      const Finding found = failed_ ? Finding{} : look();
      if (!found.error.empty() || !found.late.empty()) {
        lock.unlock();
        const std::string reason =
            with_flight_record(found.late.empty() ? found.error : timeout_message(found.late));
        // The host may never call check(), which would raise the reason. So print it.
        std::fprintf(stderr, "fsdp_ext: %s\n", reason.c_str());
        abort(reason);
        lock.lock();
      }
    }
  } catch (const std::exception& error) {
    // The device can no longer be used: the process is ending, or a kernel has failed.
    fail(detail::concat("rank ", options_.rank, ": the ", name_,
                        " communicator can no longer be watched: ", error.what()));
  }
}

// The caller holds the lock.
NcclWatchdog::Finding NcclWatchdog::look() {
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = api_.CommGetAsyncError(comm_, &state);
  state = asked == nccl::kSuccess ? state : asked;
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    return {detail::concat("rank ", options_.rank, ": NCCL reported an error of the ", name_,
                           " communicator: ", api_.describe(comm_, state)),
            ""};
  }
  const auto now = Clock::now();
  if (in_call_ && now - call_since_ > options_.timeout) {
    return {"", call_};
  }
  const Outstanding* oldest = update_oldest_pending();
  if (oldest != nullptr && now - oldest->since > options_.timeout) {
    return {"", oldest->what};
  }
  return {};
}

// Queries the pending events and returns the oldest collective that is still pending, if any. The
// caller holds the lock.
const NcclWatchdog::Outstanding* NcclWatchdog::update_oldest_pending() {
  const Outstanding* oldest = nullptr;
  for (Outstanding& candidate : outstanding_) {
    if (candidate.pending && candidate.event->query()) {
      candidate.pending = false;
    }
    if (candidate.pending && (oldest == nullptr || candidate.since < oldest->since)) {
      oldest = &candidate;
    }
  }
  return oldest;
}

std::string NcclWatchdog::timeout_message(const std::string& what) const {
  const std::string others = options_.ask_others != nullptr
                                 ? options_.ask_others(what)
                                 : "Another rank may hang, have failed, or run other collectives. ";
  return detail::concat("rank ", options_.rank, " of ", options_.size, " waited ",
                        options_.timeout.count(), " ms for ", what, ". ", others,
                        "Communication was aborted; look at the output of all ranks.");
}

}  // namespace fsdp
