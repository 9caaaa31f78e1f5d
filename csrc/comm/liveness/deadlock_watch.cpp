#include "comm/liveness/deadlock_watch.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp {
namespace {

// No string: a thread that a board held up may read it while the process ends.
constexpr char kAccount[] = "deadlock";

std::string place_of(int lane) { return lane == 0 ? "stuck in gathers" : "stuck in reductions"; }

// The message that a stuck rank writes. Another version of the library would have refused to
// connect.
struct Stuck {
  std::int64_t global_rank = 0;
  RankState state;
  char label[128] = {};
};

std::string activity_of(int rank, const std::string& label) {
  return detail::concat("rank ", rank, " is in ", label);
}

}  // namespace

std::string DeadlockWatch::look() {
  if (lanes_ == nullptr) {
    return "";
  }
  const RankState state = lanes_->state();
  const bool is_unchanged = state == last_;
  last_ = state;
  if (!is_unchanged || !(state.lanes[0].is_busy() || state.lanes[1].is_busy())) {
    return "";
  }
  // Another pair of ranks may have found the reason why this rank's wait cannot end.
  std::string account = board_->read(kAccount);
  for (int lane : {0, 1}) {
    if (account.empty() && state.is_stuck_in(lane)) {
      write_stuck(lane, state);
      account = compare(lane, state);
    }
  }
  return account;
}

void DeadlockWatch::tell(const std::string& reason) {
  if (board_ != nullptr) {
    board_->write(kAccount, reason);
  }
}

void DeadlockWatch::write_stuck(int lane, const RankState& state) {
  if (has_written_ && written_ == state) {
    return;
  }
  Stuck stuck;
  stuck.global_rank = global_rank_;
  stuck.state = state;
  std::snprintf(stuck.label, sizeof(stuck.label), "%s", lanes_->label(lane).c_str());
  board_->write(place_of(lane), {reinterpret_cast<const char*>(&stuck), sizeof(stuck)});
  written_ = state;
  has_written_ = true;
}

std::string DeadlockWatch::compare(int lane, const RankState& state) {
  const std::string text = board_->read(place_of(1 - lane));
  Stuck other;
  if (text.size() != sizeof(other)) {
    return "";
  }
  std::memcpy(&other, text.data(), sizeof(other));
  const RankState& in_0 = lane == 0 ? state : other.state;
  const RankState& in_1 = lane == 0 ? other.state : state;
  if (!wait_for_each_other(in_0, in_1)) {
    return "";
  }
  const auto other_rank = static_cast<int>(other.global_rank);
  const std::string mine = activity_of(global_rank_, lanes_->label(lane));
  const std::string theirs = activity_of(other_rank, text_in(other.label, sizeof(other.label)));
  const bool is_first = global_rank_ < other_rank;
  const std::string account = account_of_deadlock(
      global_rank_, other_rank,
      "Now " + (is_first ? mine : theirs) + ", " + (is_first ? theirs : mine) + ".");
  board_->write(kAccount, account);
  return account;
}

DeadlockThread::DeadlockThread(std::unique_ptr<Board> board,
                               std::shared_ptr<const PublishedLanes> lanes, int global_rank,
                               std::chrono::milliseconds interval)
    : shared_(
          std::make_shared<Shared>(DeadlockWatch(std::move(board), std::move(lanes), global_rank))),
      interval_(interval) {}

void DeadlockThread::start(std::function<void(const std::string&)> report) {
  shared_->report = std::move(report);
  thread_ = std::thread([shared = shared_, interval = interval_] { run(shared, interval); });
}

void DeadlockThread::fail(const std::string& reason, bool tells_others) {
  const std::lock_guard<std::mutex> lock(shared_->failure_mutex);
  if (shared_->failure.empty()) {
    shared_->failure = reason;
    shared_->tells_others = tells_others;
  }
}

void DeadlockThread::stop() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->report = nullptr;
  shared_->stopped.notify_all();
  if (!thread_.joinable()) {
    return;
  }
  if (shared_->is_looking) {
    thread_.detach();
    return;
  }
  lock.unlock();
  thread_.join();
}

std::string DeadlockThread::Shared::look() {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex);
    if (!failure.empty()) {
      return failure;
    }
  }
  return watch.look();
}

std::string DeadlockThread::Shared::reason_for_others() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  return tells_others ? failure : "";
}

void DeadlockThread::run(const std::shared_ptr<Shared>& shared,
                         std::chrono::milliseconds interval) {
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (!shared->stopped.wait_for(lock, interval, [&] { return shared->report == nullptr; })) {
    shared->is_looking = true;
    lock.unlock();
    std::string account;
    try {
      account = shared->look();
    } catch (const std::exception&) {
      // The process that serves the board may have ended. Then the collective fails by itself.
    }
    lock.lock();
    shared->is_looking = false;
    if (!account.empty() && shared->report != nullptr) {
      try {
        shared->report(account);
      } catch (const std::exception&) {
        // The waits could not be ended early, so they end with their timeouts.
      }
      shared->is_looking = true;
      lock.unlock();
      try {
        const std::string reason = shared->reason_for_others();
        if (!reason.empty()) {
          shared->watch.tell(reason);
        }
      } catch (const std::exception&) {
        // The reason could not be written, so the waits of other ranks end with their timeouts.
      }
      return;
    }
  }
}

}  // namespace fsdp
