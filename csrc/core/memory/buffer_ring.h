// A ring of equal slots that hold unsharded parameters. Each slot has an owner (a bucket's number)
// and an event that completes when the readers of its last owner are done.
//
// Note [slot lifetime]
// A bucket acquires a slot, the gather stream writes it, the compute stream reads it, and an event
// that the compute stream records behind the last reader releases it. The stream of the next writer
// waits for that event. Acquiring a slot that has an owner is an error in the schedule, never a
// wait. A released slot keeps its contents, so its bucket can reacquire it without a gather until
// another bucket acquires it (lazy reshard). The slot that was released first is acquired first,
// which keeps the newest contents the longest.
//
// A schedule that needs more slots than the ring has (the user unshards units, or units are nested
// deeper than planned) gets overflow slots, which are freed at release.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/record/ledger.h"
#include "device/stream.h"

namespace fsdp {

struct Slot {
  static constexpr int kNobody = -1;

  std::shared_ptr<void> memory;
  std::size_t bytes = 0;
  int owner = kNobody;     // the bucket that uses it now
  int contents = kNobody;  // the bucket whose parameters it contains
  int users = 0;           // units of the owner that are gathering or unsharded here
  std::uint64_t released_at = 0;
  std::unique_ptr<Event> released;
  IterationIndex released_after;  // a moment of the compute stream
  bool is_overflow = false;

  void* data() const { return memory.get(); }
};

class BufferRing {
 public:
  using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  // Allocates `slots` slots of `slot_bytes` each.
  BufferRing(Device& device, Allocate allocate, int slots, std::size_t slot_bytes);

  // Returns the slot that contains `bucket`'s parameters and has no owner, or null.
  Slot* find_contents(int bucket);
  // Makes `bucket` the owner of such a slot and keeps the contents.
  void reacquire(Slot& slot, int bucket);

  // Returns a free slot of the ring, or null if there is none. The caller orders its writer behind
  // slot->released.
  Slot* try_acquire(int bucket);
  // Allocates a slot outside the ring.
  Slot* acquire_overflow(int bucket, std::size_t bytes);

  // Work that was issued to `readers` so far may still read the slot. With `keeps_contents`, its
  // bucket may reacquire it.
  void release(Slot& slot, Stream& readers, bool keeps_contents);

  // The parameters have changed, so the contents of released slots are out of date.
  void forget_contents();

  int slots() const { return static_cast<int>(slots_.size()); }
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t allocated_bytes() const;

 private:
  Device& device_;
  Allocate allocate_;
  std::size_t slot_bytes_;
  std::uint64_t releases_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<std::unique_ptr<Slot>> overflow_;
};

}  // namespace fsdp
