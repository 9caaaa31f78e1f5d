// Sleeping until a word of memory changes, also between processes that share it (futex(2)).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fsdp::futex {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is four bytes");

// Sleeps while `word` is `value`: until a wake, for `longest` at most. May return early.
inline void wait(const Word& word, std::uint32_t value, std::chrono::milliseconds longest) {
  const timespec limit{static_cast<time_t>(longest.count() / 1000),
                       static_cast<long>(longest.count() % 1000) * 1000000L};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

// Wakes all waiters of `word`.
inline void wake(const Word& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fsdp::futex
