#include "core/memory/buffer_ring.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {

BufferRing::BufferRing(Device& device, Allocate allocate, int slots, std::size_t slot_bytes)
    : device_(device), allocate_(std::move(allocate)), slot_bytes_(slot_bytes) {
  FSDP_CHECK(slots >= 0, "A ring cannot have ", slots, " slots. It needs 0 or more.");
  for (int i = 0; i < slots; ++i) {
    auto slot = std::make_unique<Slot>();
    slot->memory = allocate_(slot_bytes_);
    slot->bytes = slot_bytes_;
    slot->released = device_.new_event();
    slots_.push_back(std::move(slot));
  }
}

Slot* BufferRing::find_contents(int bucket) {
  for (auto& slot : slots_) {
    if (slot->contents == bucket && slot->owner == Slot::kNobody) {
      return slot.get();
    }
  }
  return nullptr;
}

void BufferRing::reacquire(Slot& slot, int bucket) {
  FSDP_CHECK(slot.owner == Slot::kNobody && slot.contents == bucket, "Bucket ", bucket,
             " cannot reacquire a slot of owner ", slot.owner, " with the parameters of bucket ",
             slot.contents, ". It needs a released slot with its own parameters.");
  slot.owner = bucket;
}

Slot* BufferRing::try_acquire(int bucket) {
  Slot* oldest = nullptr;
  for (auto& slot : slots_) {
    if (slot->owner == Slot::kNobody &&
        (oldest == nullptr || slot->released_at < oldest->released_at)) {
      oldest = slot.get();
    }
  }
  if (oldest != nullptr) {
    oldest->owner = bucket;
    oldest->contents = bucket;
  }
  return oldest;
}

Slot* BufferRing::acquire_overflow(int bucket, std::size_t bytes) {
  auto slot = std::make_unique<Slot>();
  slot->memory = device_.allocate(bytes);
  slot->bytes = bytes;
  slot->owner = bucket;
  slot->contents = bucket;
  slot->is_overflow = true;
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
    // The memory returns to the device's allocator, which orders its reuse after `readers`.
    const auto position = std::find_if(overflow_.begin(), overflow_.end(),
                                       [&](const auto& held) { return held.get() == &slot; });
    overflow_.erase(position);
    return;
  }
  slot.released_at = ++releases_;
  readers.record(*slot.released);
}

void BufferRing::forget_contents() {
  for (auto& slot : slots_) {
    if (slot->owner == Slot::kNobody) {
      slot->contents = Slot::kNobody;
    }
  }
}

std::size_t BufferRing::allocated_bytes() const {
  std::size_t bytes = slots_.size() * slot_bytes_;
  for (const auto& slot : overflow_) {
    bytes += slot->bytes;
  }
  return bytes;
}

}  // namespace fsdp
