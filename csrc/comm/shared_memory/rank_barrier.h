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
// A waiter spins, then sleeps and wakes at intervals to check whether the peer's process still
// exists: "Waiting" in docs/design/shared-memory.md. A rank that ends, fails or gives up makes the
// collective fail on all ranks, since data that was read from a failed rank may be wrong. So the
// last step of a collective checks whether any rank has failed. In one lane, different tags are an
// error at once. In different lanes, see Note [lanes that wait for each other].
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shared_memory/peer.h"

namespace fsdp {

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

  // The host issues a collective, which will begin later.
  void issue_collective() { mine_.issuer.issue(); }
  // The place where waits for the lane are published.
  std::atomic<std::uint64_t>& blocked() { return mine_.issuer.blocked; }
  // Messages call the collective `what`, which must outlive it. All ranks must have the same `tag`.
  // Throws if this rank has aborted.
  void begin_collective(const std::string& what, std::uint64_t tag = 0);
  void end_collective() { mine_.activity.end(); }

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
  bool has_reached_round(const Peer& peer, const futex::Word& word) const;
  void wait_for_round(const Peer& peer, const futex::Word& word);
  void sleep_until_round(const Peer& peer, const futex::Word& word);
  [[noreturn]] void throw_timeout(const Peer& peer) const;
  [[noreturn]] void throw_mismatch(const Peer& peer, const Operation& mine,
                                   const Operation& theirs) const;
  static void throw_if_failed(const Peer& peer);
  static void throw_if_other_lane_failed(const Peer& peer);
  std::string message_prefix() const;
  void wake_waiters();

  Mailbox& mine_;
  std::vector<Peer> peers_;
  int rank_;
  std::chrono::milliseconds timeout_;
  std::uint32_t round_;
  const std::string* what_ = nullptr;
  std::uint64_t tag_ = 0;

  std::mutex mutex_;  // guards error_
  std::atomic<bool> aborted_{false};
  std::string error_;
};

}  // namespace fsdp
