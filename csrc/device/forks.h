// Whether a process was forked.
//
// Note [forks]
// A forked child has a copy of this process's memory, but only the thread that forked. The workers
// of its streams do not exist, so work that is enqueued would never run. Locks may be held by
// threads that do not exist. So streams throw in a child, and do not touch what they share with
// their worker. Lanes of the parent are never destroyed in a child: that would wait for workers,
// and close the mailboxes that the child shares with its parent.
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

  static std::atomic<std::uint32_t> forks_;  // before this process, since the first guard was made
  std::uint32_t made_after_ = count_forks();
};

}  // namespace fsdp
