// Collectives between ranks of one host through memory that they share (comm/shared_arena.h).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared_arena.h"

namespace fsdp {

struct Mailbox;

// Where the peers find this rank: made first, its address told to all. The mailboxes stay until the
// process ends, since a peer may look into them at any time.
class SharedMemoryEndpoint {
 public:
  // `name`: what peers call this rank in messages, its number among all ranks of the job. Throws,
  // saying why, where memory cannot be shared.
  explicit SharedMemoryEndpoint(int name);

  std::string address() const;  // bytes

  // For the gather and the reduce lane. `addresses` are those of all ranks' endpoints, in order of
  // rank, the own one included. Any wait for peers takes `timeout` at most. Once. Throws, saying
  // why, if a peer's memory cannot be read from here.
  std::pair<std::unique_ptr<Communicator>, std::unique_ptr<Communicator>> connect(
      const std::vector<std::string>& addresses, int rank, std::chrono::milliseconds timeout) const;

 private:
  struct Address;

  int name_;
  std::shared_ptr<Arena> arena_;
  Mailbox* mailboxes_[2];  // of the gather and the reduce lane
};

}  // namespace fsdp
