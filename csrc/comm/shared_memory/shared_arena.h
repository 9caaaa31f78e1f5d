// Memory of this process that other processes of the host can read. Ranks that share a host find
// each other's data there.
//
// Note [arena]
// Each process has one arena: a file without a name (memfd_create), as large as the host's memory
// and mapped once, so that addresses never change. Pages exist only where something is allocated.
// A peer opens the file through /proc/<pid>/fd and maps it read-only, so no rank writes another
// rank's memory. The kernel allows the same user to open it, as for ptrace. Nobody can change the
// size of the file, which is sealed. docs/design/shared-memory.md says why.
//
// After fork(), parent and child share the arena's memory. The child's own allocations come from a
// new arena, and the child does not free the parent's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "comm/shared_memory/peer_memory.h"

namespace fsdp {

class Arena {
 public:
  // Throws an error with the reason if this system cannot share memory.
  static std::shared_ptr<Arena> of_this_process();

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed memory, aligned to a page, freed with its last owner. Throws if there is too little
  // memory. The memory keeps the arena alive.
  static std::shared_ptr<void> allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes);

  bool contains(const void* memory, std::size_t bytes) const;
  std::uint64_t offset_of(const void* memory) const {
    return static_cast<std::uint64_t>(static_cast<const char*>(memory) - base_);
  }
  const char* base() const { return base_; }
  const ArenaAddress& address() const { return address_; }
  std::size_t allocated_bytes() const;

 private:
  Arena();
  void make_file();
  void reserve_addresses();
  std::size_t allocate_range(std::size_t bytes);
  void free_range(std::size_t offset, std::size_t bytes) noexcept;
  void populate_pages(std::size_t offset, std::size_t bytes) const;
  void free_pages(std::size_t offset, std::size_t bytes) const noexcept;

  ArenaAddress address_;
  int file_ = -1;
  char* base_ = nullptr;
  std::size_t reserved_ = 0;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // bytes by offset; no two ranges touch
};

// The arena of another process, mapped into this one, or this process's own.
class ArenaView {
 public:
  // All callers share one view of an arena. Throws an error with the reason if this process cannot
  // read it.
  static std::shared_ptr<const ArenaView> of(const ArenaAddress& address);

  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  const char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  explicit ArenaView(const ArenaAddress& address);
  void map_file(const ArenaAddress& address);
  void unmap() noexcept;

  std::shared_ptr<Arena> own_;
  const char* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace fsdp
