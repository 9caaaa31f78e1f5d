// Collectives between ranks of one host, through memory that they share
// (comm/shared_memory/shared_arena.h).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared_memory/host_ranks.h"
#include "comm/shared_memory/shared_arena.h"

namespace fsdp {

struct Mailbox;

TransportTraits shared_memory_traits();

// This rank's address for peers. Each rank makes its endpoint, the ranks exchange the addresses,
// and then each rank connects. Mailboxes live until the process ends, since peers may read them at
// any time.
class SharedMemoryEndpoint {
 public:
  // `global_rank` is this rank's number in the whole job, for messages. Throws an error with the
  // reason if this system cannot share memory.
  explicit SharedMemoryEndpoint(int global_rank);

  std::string address() const;  // bytes

  // Returns the communicators of the gather lane and of the reduce lane. `addresses` are those of
  // all ranks' endpoints in order of rank, this one included. Each wait for a peer is limited by
  // `timeout`. Call it once. Throws an error with the reason if an address is invalid, or a peer's
  // memory cannot be read.
  std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> connect(
      const std::vector<std::string>& addresses, int rank, std::chrono::milliseconds timeout) const;

  // The same for a group that has ranks on several hosts: connects with those of this host.
  // `addresses` are those of all ranks, and `map` says which of them share a host.
  HostLanes connect_on_host(const std::vector<std::string>& addresses, const HostMap& map, int rank,
                            std::chrono::milliseconds timeout) const;

 private:
  struct LanePeers;
  LanePeers peers_at(const std::vector<std::string>& addresses, int rank) const;

  int global_rank_;
  std::shared_ptr<Arena> arena_;
  Mailbox* mailboxes_[2];  // of the gather lane and the reduce lane
};

}  // namespace fsdp
