#include "comm/meeting.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using Standing = Mailbox::Standing;

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);  // clocks overflow
constexpr std::chrono::milliseconds kNap{50};  // between looks at whether a peer still exists

const char* text_of(Operation::Kind kind) {
  switch (kind) {
    case Operation::Kind::AllGather:
      return "an all-gather";
    case Operation::Kind::ReduceScatter:
      return "a reduce-scatter";
    case Operation::Kind::AllReduce:
      return "an all-reduce";
    case Operation::Kind::Broadcast:
      return "a broadcast";
    case Operation::Kind::Barrier:
      return "a barrier";
  }
  return "something else";
}

}  // namespace

bool Operation::agrees_with(const Operation& other) const {
  return kind == other.kind && dtype == other.dtype && root == other.root && bytes == other.bytes &&
         pattern == other.pattern;
}

std::string Operation::describe() const {
  return detail::concat(text_of(kind), " of ", bytes, " bytes (", name(dtype), ")");
}

Meetings::Meetings(Mailbox& mine, std::vector<Peer> peers, int rank,
                   std::chrono::milliseconds timeout, std::uint32_t newest)
    : mine_(mine),
      peers_(std::move(peers)),
      rank_(rank),
      timeout_(std::min(timeout, kLongest)),
      number_(newest) {}

Meetings::~Meetings() {
  Standing expected = Standing::Member;
  mine_.standing.compare_exchange_strong(expected, Standing::Left);
  wake_all();
}

void Meetings::begin(const std::string& what) {
  FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
  what_ = &what;
}

void Meetings::arrive(const Operation& operation) {
  number_ += 1;
  mine_.operations[number_ % 2] = operation;
  mine_.posted.store(number_, std::memory_order_release);
  futex::wake(mine_.posted);
}

const char* Meetings::await(int from, const Operation& operation) {
  const Peer& peer = peers_[static_cast<std::size_t>(from)];
  wait_for(peer, peer.mailbox->posted);
  const Operation& theirs = peer.mailbox->operations[number_ % 2];
  FSDP_CHECK(theirs.agrees_with(operation), own(),
             "all ranks are expected to run the same collectives, but for ", *what_,
             " this one issues ", operation.describe(), " where rank ", peer.name, " issues ",
             theirs.describe(), "; make the model and its control flow the same on every rank");
  return peer.view->at(theirs.offset);
}

void Meetings::leave() {
  mine_.finished.store(number_);  // in one order with the looks at standings below
  futex::wake(mine_.finished);
  for (const Peer& peer : peers_) {
    wait_for(peer, peer.mailbox->finished);
  }
  for (const Peer& peer : peers_) {
    check_standing(peer);
  }
}

// Seen from a word that wraps around.
bool Meetings::has_come(const futex::Word& word) const {
  return static_cast<std::int32_t>(word.load(std::memory_order_acquire) - number_) >= 0;
}

// See Note [who is missing].
void Meetings::wait_for(const Peer& peer, const futex::Word& word) {
  const auto start = Clock::now();
  while (!has_come(word)) {
    if (Clock::now() - start > kSpin) {
      sleep_until_come(peer, word);
      return;
    }
    std::this_thread::yield();
  }
}

void Meetings::sleep_until_come(const Peer& peer, const futex::Word& word) {
  const auto start = Clock::now();
  auto looked = start;
  while (true) {
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    check_standing(peer);
    const bool left = peer.mailbox->standing == Standing::Left;
    const auto now = Clock::now();
    bool ended = false;
    if (now - looked >= kNap) {
      ended = state_of(peer.arena) == ProcessState::Ended;
      looked = now;
    }
    if (has_come(word)) {  // after the looks: it may come and end
      return;
    }
    FSDP_CHECK(!left, own(), "rank ", peer.name, " has closed its side before ", *what_,
               "; run as many steps on every rank");
    FSDP_CHECK(!ended, own(), "rank ", peer.name, " (process ", peer.arena.pid,
               ") has ended before or during ", *what_, "; what it printed last may say why");
    FSDP_CHECK(!aborted_, "communication was aborted: ", async_error());
    if (now - start >= timeout_) {
      give_up(peer);
    }
    futex::wait(word, seen, std::min<std::chrono::milliseconds>(kNap, timeout_));
  }
}

void Meetings::give_up(const Peer& peer) const {
  const bool stopped = state_of(peer.arena) == ProcessState::Stopped;
  throw TimeoutError(
      detail::concat(own(), "waited ", timeout_.count(), " ms for rank ", peer.name, " (process ",
                     peer.arena.pid, stopped ? ", which is stopped" : "", ") to take part in ",
                     *what_, "; a rank that hangs, has failed, or runs something else never does"));
}

// What a peer says of itself is passed on as it is: it has the first rank's word for it.
void Meetings::check_standing(const Peer& peer) const {
  FSDP_CHECK(peer.mailbox->standing != Standing::Failed, peer.mailbox->reason);
}

void Meetings::abort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      return;
    }
    error_ = reason;
    std::snprintf(mine_.reason, sizeof(mine_.reason), "%s", reason.c_str());
    mine_.standing = Standing::Failed;
    aborted_ = true;
  }
  wake_all();
}

std::string Meetings::async_error() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      return error_;
    }
  }
  for (const Peer& peer : peers_) {
    if (peer.mailbox->standing == Standing::Failed) {
      return peer.mailbox->reason;
    }
  }
  return "";
}

std::string Meetings::own() const {
  return detail::concat("rank ", peers_[static_cast<std::size_t>(rank_)].name, ": ");
}

void Meetings::wake_all() {
  futex::wake(mine_.posted);
  futex::wake(mine_.finished);
}

}  // namespace fsdp
