#include "pinned_copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

#include "emulated_gpu.h"
#include "lasting.h"
#include "memory.h"
#include "settings.h"

namespace emulated_gpu {

using Bytes = std::vector<char>;

// A part of a copy: the pinned memory that it reads or the pinned memory that it writes.
struct PinnedPart {
  char* begin = nullptr;  // null if this side of the copy is not pinned
  std::size_t bytes = 0;
  Bytes expected;  // what has to be there until the host has waited. Empty if that is not known

  bool overlaps(const PinnedPart& other) const {
    return begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
  bool has_changed() const {
    return !expected.empty() && std::memcmp(begin, expected.data(), bytes) != 0;
  }
};

class PinnedCopy {
 public:
  PinnedPart source;
  PinnedPart target;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
  Bytes result;  // for the target, once the copy has run
  TicketPtr ticket;

  bool touches(const PinnedPart& part) const {
    return source.overlaps(part) || target.overlaps(part);
  }
};

namespace {

struct PinnedCopies {
  std::mutex mutex;
  std::list<std::shared_ptr<PinnedCopy>> in_flight;  // in the order of their calls
  std::uint32_t random = 1;
};
PinnedCopies& copies() { return lasting<PinnedCopies>(); }

PinnedPart part_of(const void* address, std::size_t bytes) {
  const std::optional<Region> region = region_of(address);
  if (!region.has_value() || !region->is_pinned()) {
    return {};
  }
  return {static_cast<char*>(const_cast<void*>(address)), bytes, {}};
}

// Bytes that are NaN in every format and not the same in two places, so that no two flags, hashes
// or counts that are read too early are equal.
Bytes nans(std::size_t bytes, std::uint32_t& random) {
  Bytes made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    random = random * 1664525 + 1013904223;
    const char low = static_cast<char>(0xf0 | (random >> 28));
    made[i] = i % 2 == 0 ? low : static_cast<char>(kPoison);
  }
  return made;
}

void check(const PinnedPart& part, const PinnedCopy& copy) {
  if (part.has_changed()) {
    report_host_write(part.begin, part.bytes, *copy.ticket->user.origin);
  }
}

// What the copy has written is there from now on. If it has not run yet, nothing happens.
void land(PinnedCopy& copy) {
  if (copy.result.empty()) {
    return;
  }
  check(copy.target, copy);
  std::memcpy(copy.target.begin, copy.result.data(), copy.bytes);
  copy.target = {};
  copy.result.clear();
}

}  // namespace

std::shared_ptr<PinnedCopy> begin_pinned_copy(void* to, const void* from, std::size_t bytes) {
  if (!settings().finds_races) {
    return nullptr;
  }
  auto copy = std::make_shared<PinnedCopy>();
  copy->source = part_of(from, bytes);
  copy->target = part_of(to, bytes);
  copy->from = from;
  copy->to = to;
  copy->bytes = bytes;
  if (copy->source.begin == nullptr && copy->target.begin == nullptr) {
    return nullptr;
  }
  PinnedCopies& known = copies();
  const std::lock_guard<std::mutex> lock(known.mutex);
  // Where earlier work is in flight, what is there may change, and must not be changed here.
  const auto is_free = [&](const PinnedPart& part) {
    return part.begin != nullptr && has_host_waited_for(part.begin, part.bytes) &&
           std::none_of(known.in_flight.begin(), known.in_flight.end(),
                        [&](const auto& other) { return other->touches(part); });
  };
  if (is_free(copy->source)) {
    copy->source.expected.assign(copy->source.begin, copy->source.begin + bytes);
  }
  if (is_free(copy->target)) {
    copy->target.expected = nans(bytes, known.random);
    std::memcpy(copy->target.begin, copy->target.expected.data(), bytes);
  }
  known.in_flight.push_back(copy);
  return copy;
}

void set_ticket(PinnedCopy& copy, const TicketPtr& ticket) {
  const std::lock_guard<std::mutex> lock(copies().mutex);
  copy.ticket = ticket;
}

void run(PinnedCopy& copy) {
  const std::lock_guard<std::mutex> lock(copies().mutex);
  if (copy.source.begin != nullptr) {
    for (const auto& other : copies().in_flight) {
      if (other->target.overlaps(copy.source)) {
        land(*other);  // the device sees what it has copied itself
      }
    }
  }
  if (copy.target.begin == nullptr) {
    std::memmove(copy.to, copy.from, copy.bytes);
    return;
  }
  const char* begin = static_cast<const char*>(copy.from);
  copy.result.assign(begin, begin + copy.bytes);
}

void end_pinned_copies() {
  PinnedCopies& known = copies();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.in_flight.remove_if([](const auto& copy) {
    if (copy->ticket == nullptr || !has_host_waited_for(copy->ticket->user)) {
      return false;
    }
    check(copy->source, *copy);
    land(*copy);
    return true;
  });
}

}  // namespace emulated_gpu
