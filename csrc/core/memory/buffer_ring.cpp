#include "core/memory/buffer_ring.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/check.h"
#include "core/memory/layout.h"

namespace fsdp {
namespace {

const std::string kOverflowSlot = "the reads of an overflow slot";

}  // namespace

BufferRing::BufferRing(Device& device, const Allocate& allocate, RingPlan plan)
    : device_(device),
      plan_(std::move(plan)),
      memory_(plan_.bytes > 0 ? allocate(plan_.bytes) : nullptr) {
  FSDP_CHECK(plan_.slots >= 0, "A ring cannot have ", plan_.slots, " slots. It needs 0 or more.");
}

Slot* BufferRing::reacquire(int bucket) {
  for (auto& slot : slots_) {
    if (slot->contents == bucket && slot->owner == Slot::kNobody) {
      slot->owner = bucket;
      return slot.get();
    }
  }
  return nullptr;
}

// Released slots hold older contents of this bucket than the next gather.
void BufferRing::forget_contents(int bucket) {
  for (auto& slot : slots_) {
    if (slot->contents == bucket && slot->owner == Slot::kNobody) {
      slot->contents = Slot::kNobody;
    }
  }
}

Slot* BufferRing::try_acquire(int bucket, std::size_t bytes, Stream& writer,
                              const std::string& what) {
  const std::size_t size =
      align_up(plan_.offsets.empty() ? plan_.slot_bytes : bytes, kRegionAlignment);
  const std::size_t offset = bytes > size ? kNoRoom : find_room(bucket, size);
  if (offset == kNoRoom) {
    return nullptr;
  }
  IterationIndex released_after;
  std::uint64_t released_at = 0;
  for_each_overlap(offset, size, [&](Slot& slot) {
    writer.wait(*slot.released, what);
    if (slot.released_at >= released_at) {
      released_at = slot.released_at;
      released_after = slot.released_after;
    }
    slot.bytes = 0;
    slot.contents = Slot::kNobody;
  });
  forget_contents(bucket);
  Slot& slot = unused_slot();
  slot.memory = std::shared_ptr<void>(memory_, static_cast<char*>(memory_.get()) + offset);
  slot.offset = offset;
  slot.bytes = size;
  slot.owner = bucket;
  slot.contents = bucket;
  slot.released_at = released_at;
  slot.released_after = released_after;
  return &slot;
}

template <typename Visit>
void BufferRing::for_each_overlap(std::size_t offset, std::size_t bytes, const Visit& visit) const {
  for (const auto& slot : slots_) {
    if (slot->bytes > 0 && slot->offset < offset + bytes && offset < slot->offset + slot->bytes) {
      visit(*slot);
    }
  }
}

// Returns the latest `released_at` of the slots that overlap these bytes of the ring. Returns
// kTaken if a bucket owns one of these slots, or if the bytes exceed the ring.
std::uint64_t BufferRing::newest_release(std::size_t offset, std::size_t bytes) const {
  std::uint64_t newest = offset + bytes <= plan_.bytes ? 0 : kTaken;
  for_each_overlap(offset, bytes, [&newest](const Slot& slot) {
    newest = std::max(newest, slot.owner == Slot::kNobody ? slot.released_at : kTaken);
  });
  return newest;
}

// Returns the planned place if it is free. Otherwise it tries both ends of the ring and of each
// slot, and takes the place that was released first.
std::size_t BufferRing::find_room(int bucket, std::size_t bytes) const {
  if (!plan_.offsets.empty()) {
    const std::size_t planned = plan_.offsets.at(static_cast<std::size_t>(bucket));
    if (newest_release(planned, bytes) != kTaken) {
      return planned;
    }
  }
  std::size_t best = kNoRoom;
  std::uint64_t best_released = kTaken;
  const auto consider = [&](std::size_t offset) {
    const std::uint64_t released = newest_release(offset, bytes);
    if (released < best_released) {
      best = offset;
      best_released = released;
    }
  };
  consider(0);
  for (const auto& slot : slots_) {
    if (slot->bytes > 0) {
      consider(slot->offset);
      consider(slot->offset + slot->bytes);
      if (slot->offset >= bytes) {
        consider(slot->offset - bytes);
      }
    }
  }
  if (plan_.bytes >= bytes) {
    consider(plan_.bytes - bytes);
  }
  return best;
}

Slot& BufferRing::unused_slot() {
  for (auto& slot : slots_) {
    if (slot->bytes == 0) {
      return *slot;
    }
  }
  slots_.push_back(std::make_unique<Slot>());
  slots_.back()->released = device_.new_event();
  return *slots_.back();
}

Slot* BufferRing::acquire_overflow(int bucket, std::size_t bytes) {
  forget_contents(bucket);
  auto slot = std::make_unique<Slot>();
  slot->memory = device_.allocate(bytes);
  slot->bytes = bytes;
  slot->owner = bucket;
  slot->contents = bucket;
  slot->is_overflow = true;
  slot->stream = device_.compute_stream().native_handle();
  slot->released = device_.new_event();
  overflow_.push_back(std::move(slot));
  return overflow_.back().get();
}

void BufferRing::release(Slot& slot, Stream& readers, bool keeps_contents) {
  FSDP_CHECK(slot.owner != Slot::kNobody, "The slot of bucket ", slot.contents,
             " was released twice. Release a slot once, by its owner.");
  slot.owner = Slot::kNobody;
  if (!keeps_contents) {
    slot.contents = Slot::kNobody;
  }
  if (slot.is_overflow) {
    // The allocator reuses the memory in the order of the stream that was current at allocation. If
    // the user has switched streams since, that stream has to wait for the reads:
    // Note [memory and the compute stream].
    if (readers.native_handle() != slot.stream) {
      readers.record(*slot.released);
      device_.stream_of(slot.stream).wait(*slot.released, kOverflowSlot);
    }
    const auto position = std::find_if(overflow_.begin(), overflow_.end(),
                                       [&](const auto& held) { return held.get() == &slot; });
    overflow_.erase(position);
    return;
  }
  slot.released_at = ++releases_;
  readers.record(*slot.released);
}

std::size_t BufferRing::allocated_bytes() const {
  std::size_t bytes = plan_.bytes;
  for (const auto& slot : overflow_) {
    bytes += slot->bytes;
  }
  return bytes;
}

}  // namespace fsdp
