// Which thread a root serves.
//
// Note [one thread]
// A root serves one thread at a time. A forward belongs to the thread that begins it, and ends
// there. A backward belongs to the thread on which its first hook runs: on the host the one that
// called backward, on a GPU one of autograd's. It need not be the thread that ran forward. A root
// belongs to the caller of a method such as unshard() while the method runs. A new root belongs to
// the thread that makes it, until the forward that needs it has ended.
//
// A second thread could enter wherever the first one releases the GIL: while it waits for a gather,
// and in all of backward. Each entry checks the root's owner, which is one atomic, and another
// thread gets an error before it has changed anything. Autograd may run parts of a backward on
// threads of its own: for deeply nested checkpointing, or for a device. The threading module did
// not start these, so they may enter while they run a backward. On a GPU one thread of autograd
// runs the backwards of all threads, so the root's owner cannot be told from other threads there.
#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp {

class RootOwner {
 public:
  enum class Use : std::uint8_t { None, SetUp, Forward, Backward, Call };

  RootOwner() : state_(pack(this_thread(), Use::SetUp)) {}

  // Makes this thread the owner until it leaves. Throws if another thread is. Returns whether there
  // was no owner before.
  bool enter(Use use) {
    const std::uint64_t seen = state_.load(std::memory_order_relaxed);
    return thread_of(seen) != this_thread() && enter_from_outside(seen, use);
  }
  // Throws as enter does, and otherwise changes nothing.
  void check() const {
    const std::uint64_t seen = state_.load(std::memory_order_relaxed);
    if (seen != 0 && thread_of(seen) != this_thread()) {
      check_from_outside(seen);
    }
  }
  // Whether another thread uses the root, so that check() throws.
  bool is_of_another_thread() const;
  // Records what the owner does from now on. Does nothing on other threads.
  void change(Use use);
  // This thread is no longer the owner.
  void leave();
  // Ends the ownership of a backward. Another thread of autograd may call it.
  void leave_backward();

 private:
  // The number of the backward that this thread runs, in the upper bits that threads leave free.
  // 0 if it runs none.
  static std::uint64_t this_backward();
  static std::uint64_t pack(std::uint32_t thread, Use use) {
    return (use == Use::Backward ? this_backward() : 0) | (std::uint64_t{thread} << 8) |
           static_cast<std::uint64_t>(use);
  }
  static Use use_of(std::uint64_t state) { return static_cast<Use>(state & 0xff); }
  static std::uint32_t thread_of(std::uint64_t state) {
    return static_cast<std::uint32_t>(state >> 8);
  }
  static std::uint64_t backward_of(std::uint64_t state) { return state >> 40 << 40; }
  static std::uint32_t this_thread();

  bool enter_from_outside(std::uint64_t seen, Use use);
  void check_from_outside(std::uint64_t seen) const;
  bool may_enter(std::uint64_t seen) const;
  bool has_left_after_failing(std::uint64_t seen) const;

  // The kernel's number of the thread, its use, and the backward if that is the use. 0: none.
  std::atomic<std::uint64_t> state_;
};

}  // namespace fsdp
