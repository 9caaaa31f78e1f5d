#include "pinned_uses.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <utility>

#include "emulated_gpu.h"
#include "lasting.h"
#include "memory.h"
#include "settings.h"

namespace emulated_gpu {

using Bytes = std::vector<char>;

struct PinnedUse {
  std::uintptr_t begin;
  std::uintptr_t end;
  TicketPtr ticket;  // null before the work is submitted
  Bytes expected;    // what the memory has to have until the host has waited. Empty: anything
  Bytes result;      // what the work has written. Empty if it has not run, or only reads
  Bytes before;      // what NaN replaces until the work runs. Empty if nothing does

  bool overlaps(std::uintptr_t other_begin, std::uintptr_t other_end) const {
    return begin < other_end && other_begin < end;
  }
  char* memory() const { return reinterpret_cast<char*>(begin); }
};

namespace {

struct Uses {
  std::mutex mutex;
  std::list<std::shared_ptr<PinnedUse>> all;
  std::uint32_t random = static_cast<std::uint32_t>(getpid()) * 2654435761u;
  const std::shared_ptr<const void> host_functions = std::make_shared<char>();
  // Around all of them, so that most accesses need no lock.
  std::atomic<std::uintptr_t> lowest{std::numeric_limits<std::uintptr_t>::max()};
  std::atomic<std::uintptr_t> highest{0};

  void add(const std::shared_ptr<PinnedUse>& use) {
    all.push_back(use);
    lowest = std::min(lowest.load(), use->begin);
    highest = std::max(highest.load(), use->end);
  }
};
Uses& uses() { return lasting<Uses>(); }

bool is_pinned(std::uintptr_t address) {
  const std::optional<Region> region = region_of(reinterpret_cast<const void*>(address));
  return region.has_value() && region->is_pinned();
}

Bytes content(const PinnedUse& use) {
  return Bytes(use.memory(), use.memory() + (use.end - use.begin));
}

// Fills the memory with bytes that are NaN in formats of 16 bits and more, and hardly ever the same
// in two places or processes. So flags, hashes and counts that are read too early differ.
void fill_with_nan(PinnedUse& use) {
  std::uint32_t& random = uses().random;
  use.expected.resize(use.end - use.begin);
  for (std::size_t i = 0; i < use.expected.size(); ++i) {
    random = random * 1664525 + 1013904223;
    const char low = static_cast<char>(0xf0 | (random >> 28));
    use.expected[i] = i % 2 == 0 ? low : static_cast<char>(kPoison);
  }
  std::memcpy(use.memory(), use.expected.data(), use.expected.size());
}

// Fails the device if the host has written the memory. Later writes of the host do not count.
void compare(PinnedUse& use) {
  const Bytes expected = std::exchange(use.expected, {});
  // Work may run before its ticket is known. Then what the host has done meanwhile does not show.
  if (use.ticket != nullptr && !expected.empty() &&
      std::memcmp(use.memory(), expected.data(), expected.size()) != 0) {
    report_host_write(use.memory(), expected.size(), *use.ticket->user.origin);
  }
}

// What is there from now on is what the work has left, or will find.
void settle(PinnedUse& use) {
  compare(use);
  for (Bytes* content : {&use.before, &use.result}) {
    std::copy(content->begin(), content->end(), use.memory());
    content->clear();
  }
}

// Work that runs before this copy reads the memory.
void restore(PinnedUse& use) {
  compare(use);
  use.expected = std::exchange(use.before, {});
  std::copy(use.expected.begin(), use.expected.end(), use.memory());
}

}  // namespace

PinnedUses begin_copy(void* to, const void* from, std::size_t bytes) {
  PinnedUses made;
  if (!settings().finds_races) {
    return made;
  }
  const std::lock_guard<std::mutex> lock(uses().mutex);
  const bool has_host_function = uses().host_functions.use_count() > 1;
  for (const void* address : {from, const_cast<const void*>(to)}) {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const auto end = begin + bytes;
    if (!is_pinned(begin)) {
      continue;
    }
    auto use = std::make_shared<PinnedUse>(PinnedUse{begin, end, nullptr, {}, {}, {}});
    // If earlier work on this memory is in flight, it may change the contents, and this must not.
    const bool is_free = !has_host_function && has_host_waited_for(address, bytes) &&
                         std::none_of(uses().all.begin(), uses().all.end(), [&](const auto& other) {
                           return other->overlaps(begin, end);
                         });
    if (is_free && address == from) {
      use->expected = content(*use);
    } else if (is_free) {
      use->before = content(*use);
      fill_with_nan(*use);
    }
    made.push_back(use);
  }
  for (const auto& use : made) {
    uses().add(use);
  }
  return made;
}

void set_ticket(const PinnedUses& made, const TicketPtr& ticket) {
  const std::lock_guard<std::mutex> lock(uses().mutex);
  for (const auto& use : made) {
    use->ticket = ticket;
    if (ticket == nullptr) {
      settle(*use);
      uses().all.remove(use);
    }
  }
}

// The host sees at no time what the copy has written.
void run_copy(const PinnedUses& made, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(uses().mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(to);
  const auto target = std::find_if(made.begin(), made.end(),
                                   [begin](const auto& use) { return use->begin == begin; });
  if (target == made.end()) {
    std::memmove(to, from, bytes);
    return;
  }
  const char* first = static_cast<const char*>(from);
  (*target)->result.assign(first, first + bytes);
  fill_with_nan(**target);
}

// Work of a stream finds what earlier work has written, and may overwrite what that has read.
void before_access(const Access& access) {
  if (access.end <= uses().lowest || access.begin >= uses().highest) {
    return;
  }
  const std::lock_guard<std::mutex> lock(uses().mutex);
  for (const auto& use : uses().all) {
    if (!use->overlaps(access.begin, access.end)) {
      continue;
    }
    if (access.is_write && access.begin <= use->begin && use->end <= access.end) {
      use->before.clear();  // all is overwritten, so NaN stays until then
    }
    if (access.is_write || !use->result.empty()) {
      settle(*use);
    } else if (!use->before.empty()) {
      restore(*use);
    }
  }
}

void after_work(const TicketPtr& ticket, const std::vector<Access>& accesses) {
  const std::lock_guard<std::mutex> lock(uses().mutex);
  for (const bool is_write : {true, false}) {
    for (const Access& access : accesses) {
      // before_access has settled earlier results, so a result found here is of this work.
      const auto has_result = [&](const auto& use) {
        return !use->result.empty() && use->overlaps(access.begin, access.end);
      };
      if (access.is_write != is_write || !is_pinned(access.begin) ||
          std::any_of(uses().all.begin(), uses().all.end(), has_result)) {
        continue;
      }
      auto use =
          std::make_shared<PinnedUse>(PinnedUse{access.begin, access.end, ticket, {}, {}, {}});
      if (is_write) {
        use->result = content(*use);
        fill_with_nan(*use);
      } else {
        use->expected = content(*use);
      }
      uses().add(use);
    }
  }
}

std::shared_ptr<const void> begin_host_function() { return uses().host_functions; }

void end_pinned_uses() {
  Uses& known = uses();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.all.remove_if([](const auto& use) {
    if (use->ticket == nullptr || !has_host_waited_for(use->ticket->user)) {
      return false;
    }
    settle(*use);
    return true;
  });
  if (known.all.empty()) {
    known.lowest = std::numeric_limits<std::uintptr_t>::max();
    known.highest = 0;
  }
}

}  // namespace emulated_gpu
