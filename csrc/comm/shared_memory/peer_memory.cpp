#include "comm/shared_memory/peer_memory.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.h"

namespace fsdp {

static_assert(std::is_trivially_copyable_v<PeerAddress>, "ranks exchange it as bytes");
static_assert(std::has_unique_object_representations_v<PeerAddress>, "no byte of it is undefined");

void throw_damaged(const std::string& who, const std::string& what) {
  throw Error(detail::concat(who, " ", what,
                             ". Its memory is damaged, or it runs another build of fsdp_ext. "
                             "Restart all ranks with one build."));
}

std::string to_bytes(const PeerAddress& address) {
  return {reinterpret_cast<const char*>(&address), sizeof(address)};
}

PeerAddress parse_address(const std::string& bytes) {
  PeerAddress address;
  FSDP_CHECK(bytes.size() == sizeof(address), "A rank sent an address of ", bytes.size(),
             " bytes, but this rank needs ", sizeof(address),
             " bytes. Run one version of fsdp_ext on all ranks.");
  std::memcpy(&address, bytes.data(), sizeof(address));
  check(address.arena.process);
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  FSDP_CHECK(address.arena.fd >= 0 && address.arena.fd <= kMost && address.global_rank >= 0 &&
                 address.global_rank <= kMost,
             "Process ", address.arena.process.pid, " sent an address with file descriptor ",
             address.arena.fd, " and rank ", address.global_rank,
             ", which cannot be. The process group's store has other data in it, or is damaged. "
             "Restart all ranks.");
  return address;
}

const char* PeerMemory::at(std::uint64_t offset, std::uint64_t before, std::uint64_t after,
                           std::size_t alignment, const char* what) const {
  const bool fits = offset <= bytes && before <= offset && after <= bytes - offset;
  if (!fits) {
    throw_damaged(who, detail::concat("has its ", what, " at offset ", offset, " (", before,
                                      " bytes before and ", after, " bytes after it), outside its ",
                                      bytes, " bytes of shared memory"));
  }
  if (offset % alignment != 0) {
    throw_damaged(who, detail::concat("has its ", what, " at offset ", offset,
                                      ", which is no multiple of ", alignment));
  }
  return base + offset;
}

}  // namespace fsdp
