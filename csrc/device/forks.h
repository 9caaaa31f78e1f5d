// Whether this process was forked off another one.
//
// Note [forks]
// A forked child has a copy of its parent's memory, but only the thread that forked. The workers of
// the parent's streams do not exist in it, so enqueued work would never run, and a lock that a
// worker held is never released. So streams throw in a child, and do not touch what they share with
// their worker. The parent's lanes are never destroyed in a child: that would wait for workers, and
// close the mailboxes that the child shares with its parent.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/check.h"

namespace fsdp {

// Remembers the process in which it was made.
class ForkGuard {
 public:
  bool is_forked() const { return made_after_ != forks_.load(std::memory_order_relaxed); }

  // Throws in a forked child.
  void check() const {
    if (is_forked()) {
      throw_forked();
    }
  }

 private:
  static std::uint32_t count_forks();
  [[noreturn]] static void throw_forked();

  static std::atomic<std::uint32_t> forks_;  // that led to this process, since the first guard
  std::uint32_t made_after_ = count_forks();
};

}  // namespace fsdp
