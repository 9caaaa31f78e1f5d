#include "comm/shared_memory/mailbox.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/text.h"
#include "device/host_stream.h"

namespace fsdp {
namespace {

const char* text_of(Operation::Kind kind) {
  switch (kind) {
    case Operation::Kind::AllGather:
      return "an all-gather";
    case Operation::Kind::ReduceScatter:
      return "a reduce-scatter";
    case Operation::Kind::AllReduce:
      return "an all-reduce";
  }
  return "an unknown collective";
}

// Copies memory that a peer may change meanwhile. A peer cannot change the copy after it was
// checked.
template <typename T>
T read_once(const T& source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(std::uint64_t) == 0 &&
                    alignof(T) >= alignof(std::uint64_t),
                "it is read in words");
  constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);
  using Word = std::uint64_t __attribute__((may_alias));
  Word words[kWords];
  const auto* from = reinterpret_cast<const Word*>(&source);
  for (std::size_t i = 0; i < kWords; ++i) {
    words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  }
  T copy;
  std::memcpy(&copy, words, sizeof(copy));
  return copy;
}

}  // namespace

// - Operation

bool Operation::matches(const Operation& other) const {
  return kind == other.kind && dtype == other.dtype && bytes == other.bytes &&
         pattern == other.pattern && tag == other.tag && before == other.before &&
         after == other.after;
}

std::string Operation::describe() const {
  return detail::concat(text_of(kind), " of ", bytes, " bytes (", name(dtype), ")");
}

// - Activity

// A peer that sees any new word also sees the odd version, or a later one.
void Activity::begin(const std::string& label) {
  const std::uint64_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_relaxed);
  const std::size_t length = std::min(label.size(), kLabelBytes - 1);
  for (std::size_t i = 0; i * sizeof(std::uint64_t) <= length; ++i) {
    const std::size_t first = i * sizeof(std::uint64_t);
    std::uint64_t word = 0;
    std::memcpy(&word, label.data() + first, std::min(length - first, sizeof(word)));
    words_[i].store(word, std::memory_order_release);
  }
  version_.store(version + 2, std::memory_order_release);
}

std::string Activity::label() const {
  constexpr int kAttempts = 100;
  char text[kLabelBytes];
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t before = version_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_acquire);
      std::memcpy(text + i * sizeof(word), &word, sizeof(word));
    }
    if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) {
      return text_in(text, sizeof(text));
    }
  }
  return {};
}

// - Issuer

void Issuer::issue() {
  const std::uint64_t me = this_thread();
  const std::uint64_t before = thread.load(std::memory_order_relaxed);
  if (before != me) {
    thread.store(before == kNobody ? me : kSeveral, std::memory_order_relaxed);
  }
  issued.store(issued.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// - Checked reads

const Mailbox& mailbox_in(const PeerMemory& memory, std::uint64_t offset) {
  return *reinterpret_cast<const Mailbox*>(
      memory.at(offset, /*before=*/0, sizeof(Mailbox), alignof(Mailbox), "mailbox"));
}

// The difference is signed because numbers wrap around. A peer is ahead by one round at most: for a
// second one it would need this rank's post. It is behind by two rounds at most, as many as a
// collective has.
bool has_reached(std::uint32_t seen, std::uint32_t round, const std::string& who) {
  const auto ahead = static_cast<std::int32_t>(seen - round);
  if (ahead < -2 || ahead > 1) {
    throw_damaged(who, detail::concat("is in round ", seen,
                                      " of a collective, which cannot be: "
                                      "this rank is in round ",
                                      round));
  }
  return ahead >= 0;
}

Mailbox::State state_in(const Mailbox& mailbox, const std::string& who) {
  const Mailbox::State state = mailbox.state;
  if (state > Mailbox::State::Closed) {
    throw_damaged(who, detail::concat("has a communicator in the unknown state ",
                                      static_cast<std::uint32_t>(state)));
  }
  return state;
}

std::string reason_in(const Mailbox& mailbox) {
  char reason[Mailbox::kReasonBytes];
  std::memcpy(reason, mailbox.reason, sizeof(reason));
  return text_in(reason, sizeof(reason));
}

Operation operation_in(const Mailbox& mailbox, std::uint32_t round) {
  return read_once(mailbox.operations[round % 2]);
}

const char* input_in(const PeerMemory& memory, const Operation& operation) {
  const std::size_t alignment = std::max<std::size_t>(itemsize(operation.dtype), 1);
  return memory.at(operation.offset, operation.before, operation.after, alignment, "input");
}

}  // namespace fsdp
