#include "comm/nccl_watchdog.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongestPollInterval = std::chrono::milliseconds(500);

}  // namespace

void print_failure(const std::string& reason) {
  std::fprintf(stderr, "fsdp_ext: %s\n", reason.c_str());
}

NcclWatchdog::NcclWatchdog(const nccl::Api& api, Device& device, nccl::Comm comm,
                           const NcclOptions& options, std::string name, int lane)
    : api_(api),
      device_(device),
      comm_(comm),
      options_(options),
      name_(std::move(name)),
      lane_(lane),
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

void NcclWatchdog::watch_collective(Stream& stream, const std::string& what, Ends ends) {
  if (device_.is_capturing()) {  // it runs when the user replays the graph
    captured_ = true;
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  issued_ += 1;
  Outstanding& newest = outstanding_[issued_ % outstanding_.size()];
  if (newest.event == nullptr) {
    newest.event = device_.new_event();
  }
  newest.number = issued_;
  newest.behind = stream.behind().collectives[1 - lane_];
  if (ends == Ends::WithAll) {
    stream.add_collective(lane_, issued_);
  }
  stream.record(*newest.event);
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

void NcclWatchdog::abort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) {
      return;
    }
    error_ = reason;
    failed_ = true;
  }
  // Revoking ends running kernels but, unlike aborting, frees nothing that another thread may be
  // about to use. A revoked communicator stays until the process ends, which should be soon.
  if (api_.CommRevoke != nullptr && api_.CommRevoke(comm_, /*flags=*/0) == nccl::kSuccess) {
    revoked_ = true;
    return;
  }
  abort_communicator();
}

void NcclWatchdog::abort_communicator() {
  if (captured_) {  // aborting would block until no graph holds the communicator
    std::thread([&api = api_, comm = comm_] { api.CommAbort(comm); }).detach();
  } else {
    api_.CommAbort(comm_);
  }
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
      if (revoked_ && in_call_) {
        revoked_ = false;
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
        print_failure(reason);
        abort(reason);
        lock.lock();
      }
    }
  } catch (const std::exception& error) {
    // The device can no longer be used: the process is ending, or a kernel has failed.
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = detail::concat("rank ", options_.rank, ": the ", name_,
                            " communicator can no longer be watched: ", error.what());
    failed_ = true;
  }
}

// The caller holds the lock.
NcclWatchdog::Finding NcclWatchdog::look() {
  nccl::Result state = nccl::kSuccess;
  if (api_.CommGetAsyncError(comm_, &state) == nccl::kSuccess && state != nccl::kSuccess &&
      state != nccl::kInProgress) {
    return {detail::concat("rank ", options_.rank, ": NCCL reported an error of the ", name_,
                           " communicator: ", api_.describe(comm_, state)),
            ""};
  }
  const auto now = Clock::now();
  if (in_call_ && now - call_since_ > options_.timeout) {
    return {"", call_};
  }
  const Outstanding* oldest = update_oldest_pending();
  publish(oldest);
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

// Says what the lane is in if that has been so since the last poll. The caller holds the lock.
void NcclWatchdog::publish(const Outstanding* oldest) {
  const std::uint32_t number = oldest != nullptr && !captured_ ? oldest->number : 0;
  const bool stays = std::exchange(oldest_, number) == number && number != 0;
  if (options_.lanes != nullptr) {
    DeviceLanes::Collective collective;
    if (stays) {
      collective = {number, oldest->behind, oldest->what};
    }
    options_.lanes->publish(lane_, std::move(collective));
  }
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
