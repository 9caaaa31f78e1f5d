// How ranks that share memory synchronise for a collective, and how they notice a missing rank.
//
// Note [rank barrier]
// A collective has one round, or two. In a round, each rank writes into its mailbox where its input
// is, and posts the number of the round. It waits for the posts of the others and reads what it
// needs directly from their inputs. At the end of the collective each rank publishes that it has
// finished reading, and waits until all have. So an input may change as soon as the collective is
// over, as with any transport. A rank writes to its own memory only. Numbers of rounds wrap around,
// which is safe because no rank posts a round before all ranks have posted the one before.
//
// Note [missing ranks]
// A waiter first spins for a moment, and yields its core meanwhile. Then it sleeps on the word that
// it waits for, and wakes at intervals to check whether the peer's process still exists. A rank
// that ends, fails or gives up makes the collective fail on all ranks, since data that was read
// from a failed rank may be wrong. So the last step of a collective checks whether any rank has
// failed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "comm/futex.h"
#include "comm/shared_arena.h"

namespace fsdp {

// What a rank posts about the collective that it runs.
struct Operation {
  enum class Kind : std::uint32_t { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier };

  // Whether both are the same collective. Offsets may differ.
  bool matches(const Operation& other) const;
  std::string describe() const;

  Kind kind = Kind::Barrier;
  DType dtype = DType::Bytes;
  std::int32_t root = 0;
  std::uint64_t bytes = 0;    // of the rank's input
  std::uint64_t pattern = 0;  // hash of how the parts of the input lie
  std::uint64_t offset = 0;   // of the input, in the rank's arena
};

// What one rank publishes for one communicator. It lies in the rank's arena, and peers only read
// it.
struct Mailbox {
  enum class State : std::uint32_t { Active, Failed, Closed };

  alignas(64) futex::Word posted{0};    // the last round that the rank has posted
  alignas(64) futex::Word finished{0};  // the last round whose inputs it has finished reading
  alignas(64) std::atomic<State> state{State::Active};
  char reason[1024] = {};   // why the rank failed; written before `state`
  Operation operations[2];  // of the last round and the one before, by the parity of their numbers
};

struct Peer {
  ArenaAddress arena;
  std::shared_ptr<const ArenaView> view;
  const Mailbox* mailbox = nullptr;
  int global_rank = 0;  // its rank in the whole job, for messages
};

// One rank's side of one communicator. One thread runs the rounds; any thread may abort them.
class RankBarrier {
 public:
  // `peers` are all ranks in order, this one included. Each wait is limited by `timeout`.
  // `last_round` is the number that all mailboxes show; only tests set it.
  RankBarrier(Mailbox& mine, std::vector<Peer> peers, int rank, std::chrono::milliseconds timeout,
              std::uint32_t last_round = 0);
  ~RankBarrier();

  RankBarrier(const RankBarrier&) = delete;
  RankBarrier& operator=(const RankBarrier&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // Messages call the collective `what`, which must outlive it. Throws if this rank has aborted.
  void begin_collective(const std::string& what);

  // Starts the next round. Peers may read the input from now on.
  void post(const Operation& operation);
  // Waits until rank `from` has posted this round, checks that it posted the same collective, and
  // returns where its input is.
  const char* wait_for_input(int from, const Operation& operation);
  // Publishes that this rank has finished reading, and waits until all ranks have. The input may
  // change afterwards.
  void finish();

  // Makes the collectives of this rank fail, and with them those of all ranks.
  void abort(const std::string& reason);
  // Why a collective has failed on this rank or, as far as is known, on another; empty if none has.
  std::string async_error();

 private:
  bool has_reached_round(const futex::Word& word) const;
  void wait_for_round(const Peer& peer, const futex::Word& word);
  void sleep_until_round(const Peer& peer, const futex::Word& word);
  [[noreturn]] void throw_timeout(const Peer& peer) const;
  void throw_if_failed(const Peer& peer) const;
  std::string message_prefix() const;
  void wake_waiters();

  Mailbox& mine_;
  std::vector<Peer> peers_;
  int rank_;
  std::chrono::milliseconds timeout_;
  std::uint32_t round_;
  const std::string* what_ = nullptr;

  std::mutex mutex_;  // guards error_
  std::atomic<bool> aborted_{false};
  std::string error_;
};

}  // namespace fsdp
