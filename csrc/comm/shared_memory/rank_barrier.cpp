#include "comm/shared_memory/rank_barrier.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "base/check.h"
#include "comm/communicator.h"
#include "comm/liveness/lane_watch.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using State = Mailbox::State;

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);  // no overflow
constexpr std::chrono::milliseconds kProcessCheckInterval{50};
constexpr std::chrono::milliseconds kUnchanged{1000};  // see LaneWatch

}  // namespace

Peer::Peer(const PeerAddress& address, PeerMemory a_memory, int a_lane)
    : process(address.arena.process),
      memory(std::move(a_memory)),
      mailboxes{&mailbox_in(memory, address.mailboxes[0]),
                &mailbox_in(memory, address.mailboxes[1])},
      lane(a_lane),
      global_rank(static_cast<int>(address.global_rank)) {}

RankBarrier::RankBarrier(Mailbox& mine, std::vector<Peer> peers, int rank,
                         std::chrono::milliseconds timeout, std::uint32_t last_round)
    : mine_(mine),
      peers_(std::move(peers)),
      rank_(rank),
      timeout_(std::min(timeout, kLongestTimeout)),
      round_(last_round) {}

RankBarrier::~RankBarrier() {
  State expected = State::Active;
  mine_.state.compare_exchange_strong(expected, State::Closed);
  wake_waiters();
}

void RankBarrier::begin_collective(const std::string& what, std::uint64_t tag) {
  FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
  what_ = &what;
  tag_ = tag;
  mine_.activity.begin(what);
}

void RankBarrier::post(const Operation& operation) {
  round_ += 1;
  mine_.operations[round_ % 2] = operation;
  mine_.operations[round_ % 2].tag = tag_;
  mine_.posted.store(round_, std::memory_order_release);
  futex::wake(mine_.posted);
}

const char* RankBarrier::wait_for_input(int from, const Operation& operation) {
  const Peer& peer = peers_[static_cast<std::size_t>(from)];
  wait_for_round(peer, peer.mailbox().posted);
  const Operation theirs = operation_in(peer.mailbox(), round_);
  Operation mine = operation;
  mine.tag = tag_;
  if (!theirs.matches(mine)) {
    throw_mismatch(peer, mine, theirs);
  }
  return input_in(peer.memory, theirs);
}

void RankBarrier::throw_mismatch(const Peer& peer, const Operation& mine,
                                 const Operation& theirs) const {
  throw Error(detail::concat(
      message_prefix(), "ranks issued different collectives: this rank issued ", *what_, ", ",
      mine.describe(), ", and rank ", peer.global_rank, " issued ", peer.mailbox().activity.label(),
      ", ", theirs.describe(), ". ", kRunTheSameUnits));
}

void RankBarrier::finish() {
  mine_.finished.store(round_);  // sequentially consistent, as are the reads of `state` below
  futex::wake(mine_.finished);
  for (const Peer& peer : peers_) {
    wait_for_round(peer, peer.mailbox().finished);
  }
  for (const Peer& peer : peers_) {
    throw_if_failed(peer);
  }
}

bool RankBarrier::has_reached_round(const Peer& peer, const futex::Word& word) const {
  return has_reached(word.load(std::memory_order_acquire), round_, peer.memory.who);
}

// See Note [missing ranks].
void RankBarrier::wait_for_round(const Peer& peer, const futex::Word& word) {
  const auto start = Clock::now();
  while (!has_reached_round(peer, word)) {
    if (Clock::now() - start > kSpin) {
      sleep_until_round(peer, word);
      return;
    }
    std::this_thread::yield();
  }
}

void RankBarrier::sleep_until_round(const Peer& peer, const futex::Word& word) {
  const auto start = Clock::now();
  auto last_check = start;
  LaneWatch watch(peers_, kUnchanged);
  while (true) {
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    throw_if_failed(peer);
    const bool closed = state_in(peer.mailbox(), peer.memory.who) == State::Closed;
    const auto now = Clock::now();
    const bool looks = now - last_check >= kProcessCheckInterval;
    bool ended = false;
    if (looks) {
      ended = state_of(peer.process) == ProcessState::Ended;
      last_check = now;
    }
    // Read after the checks: the peer may have reached the round and ended afterwards.
    if (has_reached_round(peer, word)) {
      return;
    }
    if (closed || ended) {
      throw_if_other_lane_failed(peer);
    }
    FSDP_CHECK(
        !closed, message_prefix(), "rank ", peer.global_rank,
        " has closed its communicator before ", *what_,
        ". If it raised, its last output says why. Otherwise run the same number of steps on "
        "every rank.");
    FSDP_CHECK(!ended, message_prefix(), "rank ", peer.global_rank, " (process ", peer.process.pid,
               ") has ended before or during ", *what_, ". Its last output may say why.");
    FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
    if (looks) {
      watch.look(now);
    }
    if (now - start >= timeout_) {
      throw_timeout(peer);
    }
    futex::wait(word, seen, std::min<std::chrono::milliseconds>(kProcessCheckInterval, timeout_));
  }
}

void RankBarrier::throw_timeout(const Peer& peer) const {
  const bool stopped = state_of(peer.process) == ProcessState::Stopped;
  throw TimeoutError(detail::concat(
      message_prefix(), "waited ", timeout_.count(), " ms for rank ", peer.global_rank,
      " (process ", peer.process.pid, stopped ? ", which is stopped" : "", ") to take part in ",
      *what_, ". ", what_ranks_do(peers_),
      " A rank may hang, have failed, or run another program. Look at the output of all ranks."));
}

// The reason why a rank has ended, if it failed before in the other lane.
void RankBarrier::throw_if_other_lane_failed(const Peer& peer) {
  if (state_in(peer.of_other_lane(), peer.memory.who) == State::Failed) {
    throw Error(reason_in(peer.of_other_lane()));
  }
}

// The reason is passed on unchanged. It already begins with the rank that failed first.
void RankBarrier::throw_if_failed(const Peer& peer) {
  if (state_in(peer.mailbox(), peer.memory.who) == State::Failed) {
    throw Error(reason_in(peer.mailbox()));
  }
}

void RankBarrier::abort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      return;
    }
    error_ = reason;
    std::snprintf(mine_.reason, sizeof(mine_.reason), "%s", reason.c_str());
    mine_.state = State::Failed;
    aborted_ = true;
  }
  wake_waiters();
}

std::string RankBarrier::async_error() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      return error_;
    }
  }
  for (const Peer& peer : peers_) {
    if (peer.mailbox().state == State::Failed) {
      return reason_in(peer.mailbox());
    }
  }
  return "";
}

std::string RankBarrier::message_prefix() const {
  return detail::concat("rank ", peers_[static_cast<std::size_t>(rank_)].global_rank, ": ");
}

void RankBarrier::wake_waiters() {
  futex::wake(mine_.posted);
  futex::wake(mine_.finished);
}

}  // namespace fsdp
