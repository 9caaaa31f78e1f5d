// A ring that holds unsharded parameters: one piece of memory, in which each bucket gets a slot of
// its own size. Each slot has an owner (a bucket's number) and an event that completes when the
// readers of its last owner are done.
//
// Note [slot lifetime]
// A bucket acquires a slot, the gather stream writes it, the compute stream reads it, and an event
// that the compute stream records behind the last reader releases it. If other streams of the user
// read it, too, the compute stream waits for these first. The stream of the next writer waits for
// that event. A slot that has an owner is never overwritten: if the ring has no room beside such
// slots, there is no slot. A released slot keeps its contents, so its bucket can reacquire it
// without a gather until another slot overlaps it (lazy reshard).
//
// A new slot lies where the plan says (Note [ring places] in core/memory/ring_plan.h), or wherever
// there is room. Of several places, it takes the one that was released first, which keeps the
// newest contents the longest.
//
// A schedule that needs more slots than the ring has (the user unshards units, or units are nested
// deeper than planned) gets overflow slots, which are freed at release.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/memory/ring_plan.h"
#include "core/record/ledger.h"
#include "device/stream.h"

namespace fsdp {

struct Slot {
  static constexpr int kNobody = -1;

  std::shared_ptr<void> memory;
  std::size_t offset = 0;      // in the ring
  std::size_t bytes = 0;       // 0: it has no memory now
  int owner = kNobody;         // the bucket that uses it now
  int contents = kNobody;      // the bucket whose parameters it contains
  int users = 0;               // units of the owner that are gathering or unsharded here
  std::vector<void*> read_on;  // compute streams (native handles) that its users run on
  std::uint64_t released_at = 0;
  std::unique_ptr<Event> released;
  IterationIndex released_after;  // a moment of the compute stream
  bool is_overflow = false;
  void* stream = nullptr;  // of an overflow slot: the compute stream that its memory belongs to

  void* data() const { return memory.get(); }
};

class BufferRing {
 public:
  using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  BufferRing(Device& device, const Allocate& allocate, RingPlan plan);

  // Makes `bucket` the owner of the released slot that still contains its parameters. Null if there
  // is none.
  Slot* reacquire(int bucket);

  // Returns a slot in the ring, or null if there is no room. Work issued to `writer` from now on
  // starts when the readers of the slots that it overlaps are done. Each call has the same writer,
  // since only that stream orders what is left of an overlapped slot. `what` names the work in
  // error messages.
  Slot* try_acquire(int bucket, std::size_t bytes, Stream& writer, const std::string& what);
  // Allocates a slot outside the ring.
  Slot* acquire_overflow(int bucket, std::size_t bytes);

  // Work that was issued to `readers` so far may still read the slot. With `keeps_contents`, its
  // bucket may reacquire it.
  void release(Slot& slot, Stream& readers, bool keeps_contents);

  // Visits overflow slots, too.
  template <typename Visit>
  void for_each_slot(const Visit& visit) const {
    for (const auto* slots : {&slots_, &overflow_}) {
      for (const auto& slot : *slots) {
        visit(*slot);
      }
    }
  }

  const RingPlan& plan() const { return plan_; }
  std::size_t allocated_bytes() const;

 private:
  static constexpr std::size_t kNoRoom = static_cast<std::size_t>(-1);
  static constexpr std::uint64_t kTaken = static_cast<std::uint64_t>(-1);

  template <typename Visit>
  void for_each_overlap(std::size_t offset, std::size_t bytes, const Visit& visit) const;
  std::uint64_t newest_release(std::size_t offset, std::size_t bytes) const;
  std::size_t find_room(int bucket, std::size_t bytes) const;
  void forget_contents(int bucket);
  Slot& unused_slot();

  Device& device_;
  const RingPlan plan_;
  std::shared_ptr<void> memory_;
  std::uint64_t releases_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;  // without overlap; some have no memory now
  std::vector<std::unique_ptr<Slot>> overflow_;
};

}  // namespace fsdp
