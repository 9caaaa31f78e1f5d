// The ranks of one host, in collectives of a group that has ranks on several hosts.
//
// Note [groups that span hosts]
// Ranks of one host read each other's data in memory that they share, and ranks of different hosts
// send messages (comm/messages/composed.h): docs/design/transports.md. Every two ranks of different
// hosts exchange a first message, even if no payload follows. So ranks that differ name each other
// as without shared memory. Ranks of one host compare their collectives in the barrier
// (comm/shared_memory/rank_barrier.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/shared_memory/host_map.h"
#include "comm/shared_memory/rank_barrier.h"
#include "comm/shared_memory/shared_arena.h"

namespace fsdp {

// A rank of this host failed, is missing, or is in another collective. The message names it.
class HostFailure : public Error {
 public:
  using Error::Error;
};

// One rank's side of one lane. It identifies ranks by their numbers in the group.
class HostRanks {
 public:
  // `peers` are the ranks of this host in order, this one included. Each wait is limited by
  // `timeout`.
  HostRanks(std::shared_ptr<Arena> arena, Mailbox& mine, std::vector<Peer> peers, HostMap map,
            int rank, std::chrono::milliseconds timeout);

  const HostMap& map() const { return map_; }
  // The other ranks of this host. Each rank begins behind itself, which spreads their reads.
  const std::vector<int>& others() const { return others_; }

  // Memory that the others can read.
  std::shared_ptr<void> allocate(std::size_t bytes) const { return Arena::allocate(arena_, bytes); }
  bool can_read(const void* memory, std::size_t bytes) const {
    return arena_->contains(memory, bytes);
  }

  // A collective is a begin, one or two rounds, a finish and an end. A round is a post, and a wait
  // for each other rank. They throw HostFailure.
  void begin(const std::string& what, std::uint64_t tag);
  // Lets the other ranks read `reach` bytes at `memory`. The other arguments describe the
  // collective. They and `reach` have to be equal on all ranks, which the barrier checks.
  void post(const void* memory, std::size_t reach, Operation::Kind kind, DType dtype,
            std::size_t bytes);
  // Waits for the post of rank `from`, and returns the memory that it lets this rank read.
  const char* offer_of(int from);
  // Blocks until all ranks of the host have finished reading.
  void finish();
  void end() { barrier_.end_collective(); }

  void abort(const std::string& reason) { barrier_.abort(reason); }

 private:
  std::shared_ptr<Arena> arena_;
  HostMap map_;
  std::vector<int> others_;
  std::vector<int> places_;  // of the group's ranks, among those of this host
  Operation posted_;
  RankBarrier barrier_;
};

// Of both lanes.
struct HostLanes {
  std::unique_ptr<HostRanks> gather;
  std::unique_ptr<HostRanks> reduce;
};

}  // namespace fsdp
