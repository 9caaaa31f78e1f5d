// A rank as its peers see it.
#pragma once

#include "comm/shared_memory/mailbox.h"
#include "comm/shared_memory/peer_memory.h"

namespace fsdp {

struct Peer {
  // Throws if the peer's memory has no mailboxes where the peer says. `lane` is the lane of the
  // communicator that has this peer: 0 for gathers, 1 for reductions.
  Peer(const PeerAddress& address, PeerMemory a_memory, int a_lane);

  const Mailbox& mailbox() const { return *mailboxes[lane]; }
  const Mailbox& of_other_lane() const { return *mailboxes[1 - lane]; }

  ProcessIdentity process;
  PeerMemory memory;
  const Mailbox* mailboxes[2];  // of the gather lane and the reduce lane
  int lane;
  int global_rank;  // its rank in the whole job, for messages
};

}  // namespace fsdp
