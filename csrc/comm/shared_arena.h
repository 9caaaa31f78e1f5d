// Memory of this process that other processes of the host can read: where ranks that share a host
// find each other's data.
//
// Note [arena]
// One arena a process: a file without a name (memfd_create), reserved as large as the host's memory
// and mapped once, so that addresses stay; pages exist where something was allocated. A peer opens
// it through /proc/<pid>/fd and maps it for reading alone: nobody writes another rank's memory.
// Nothing has a name anywhere, so nothing can be left behind however a process ends, and what a
// container gives /dev/shm does not matter. The kernel frees the pages when the last process that
// maps them has ended. Who may open the file is decided by the kernel as for ptrace: the same user.
//
// After a fork the child's mapping is still the parent's memory. What the child allocates is in an
// arena of its own, and what it frees of the parent's is left alone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace fsdp {

// Where to find an arena; travels between processes as bytes.
struct ArenaAddress {
  char host[48] = {};               // the boot's id: differs between hosts
  std::uint64_t pid_namespace = 0;  // pids mean the same within one
  std::uint64_t token = 0;          // at the arena's very start, too
  std::uint64_t started = 0;        // the process, in the kernel's ticks since boot
  std::uint64_t base = 0;           // in its own process
  std::uint64_t bytes = 0;
  std::int32_t pid = 0;
  std::int32_t fd = -1;
};

class Arena {
 public:
  // Throws, saying why, where there can be none.
  static std::shared_ptr<Arena> of_this_process();

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeros, aligned to a page, that go when the last owner lets go. Throws where there is not as
  // much memory. The arena lives at least as long.
  static std::shared_ptr<void> allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes);

  bool contains(const void* memory, std::size_t bytes) const;
  std::uint64_t offset_of(const void* memory) const {
    return static_cast<std::uint64_t>(static_cast<const char*>(memory) - base_);
  }
  const ArenaAddress& address() const { return address_; }
  std::size_t allocated_bytes() const;

 private:
  Arena();
  std::size_t take(std::size_t bytes);
  void give_back(std::size_t offset, std::size_t bytes) noexcept;
  void free_pages(std::size_t offset, std::size_t bytes) const noexcept;

  ArenaAddress address_;
  char* base_ = nullptr;
  std::size_t reserved_ = 0;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // bytes by offset; no two touch
};

// Another process's arena as this one sees it, or this one's own.
class ArenaView {
 public:
  // One view of an arena serves all who ask. Throws, saying why, if it cannot be read from here.
  static std::shared_ptr<const ArenaView> of(const ArenaAddress& address);

  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  const char* at(std::uint64_t offset) const { return base_ + offset; }

 private:
  explicit ArenaView(const ArenaAddress& address);
  void unmap() noexcept;

  std::shared_ptr<Arena> own_;
  const char* base_ = nullptr;
  std::size_t mapped_ = 0;
};

// Of the process that an address names, seen from here.
enum class ProcessState : std::uint8_t { Runs, Stopped, Ended };
ProcessState state_of(const ArenaAddress& address);

}  // namespace fsdp
