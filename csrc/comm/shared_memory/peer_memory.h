// Memory of another rank, and checks of that rank's statements about it.
//
// Note [peers are not trusted]
// A rank that fails may write anything anywhere first, and the process group's store may hold what
// another program left there. So whatever comes from a peer is checked before it is used: addresses
// by parse_address, offsets by PeerMemory, mailboxes by the functions of
// comm/shared_memory/mailbox.h. Each check reads a value exactly once, because a peer can change it
// at any time. A damaged peer can make a collective fail, or make its result wrong. It cannot crash
// this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/liveness/process_identity.h"

namespace fsdp {

// The address of an arena.
struct ArenaAddress {
  ProcessIdentity process;
  std::uint64_t token = 0;  // also stored in the first bytes of the arena
  std::uint64_t bytes = 0;
  std::int64_t fd = -1;  // of the process
};

// The address of a rank. Ranks exchange it as bytes.
struct PeerAddress {
  ArenaAddress arena;
  std::uint64_t mailboxes[2] = {};  // offsets in the arena, of the gather lane and the reduce lane
  std::int64_t global_rank = 0;     // in the whole job, for messages
};

std::string to_bytes(const PeerAddress& address);
// Throws if the bytes are no address. Nothing is known yet about the memory at that address.
PeerAddress parse_address(const std::string& bytes);

// Throws the error for a peer that wrote data that no rank of this version writes. `who` is the
// peer, and `what` begins with a verb.
[[noreturn]] void throw_damaged(const std::string& who, const std::string& what);

struct PeerMemory {
  // Returns a pointer to `offset`, if the peer has `before` bytes in front of it and `after` bytes
  // behind it, and it is aligned. Otherwise throws an error that names the offset `what`.
  const char* at(std::uint64_t offset, std::uint64_t before, std::uint64_t after,
                 std::size_t alignment, const char* what) const;

  std::shared_ptr<const void> owner;  // keeps the memory mapped
  const char* base = nullptr;         // aligned to a page
  std::size_t bytes = 0;              // as mapped, whatever the peer says
  std::string who;                    // names the peer in messages
};

}  // namespace fsdp
