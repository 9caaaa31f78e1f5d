// A fixed set of equal slots that hold unsharded parameters, each with an owner (a bucket, by its
// number) and an event that says when its last owner's readers are done.
//
// Note [slot lifetime]
// A slot is taken for a bucket, written on the gather stream, read on the compute stream and
// released by an event recorded on the compute stream behind the last reader. Whoever writes it
// next makes its stream wait for that event. Taking a slot that has an owner is an error in the
// schedule, never a wait. Releasing does not wipe: a slot remembers whose parameters it holds, so
// that the bucket can take it back as it is as long as nobody else has (lazy reshard). Free slots
// are given out longest-released first, which keeps the newest contents the longest.
//
// A schedule that needs more slots than the ring has (units unsharded by hand, units nested
// deeper than planned) gets overflow slots, which are freed at release.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/ledger.h"
#include "device/stream.h"

namespace fsdp {

struct Slot {
  static constexpr int kNobody = -1;

  std::shared_ptr<void> memory;
  std::size_t bytes = 0;
  int owner = kNobody;     // the bucket that holds it now
  int contents = kNobody;  // the bucket whose parameters it holds
  int holders = 0;         // units of the owner that are gathering or unsharded here
  std::uint64_t released_at = 0;
  std::unique_ptr<Event> released;
  IterationIndex released_after;  // of the compute stream
  bool overflow = false;

  void* data() const { return memory.get(); }
};

class BufferRing {
 public:
  using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  // Allocates `slots` slots of `slot_bytes` each, once.
  BufferRing(Device& device, Allocate allocate, int slots, std::size_t slot_bytes);

  // The slot that still holds `bucket`'s parameters and has no owner, or null.
  Slot* find_contents(int bucket);
  // Takes a slot as it is, contents included.
  void take_back(Slot& slot, int bucket);

  // Takes a free slot of the ring, or null if there is none. The caller orders its writer behind
  // slot->released.
  Slot* try_take(int bucket);
  // Allocates a slot outside the ring.
  Slot* take_overflow(int bucket, std::size_t bytes);

  // Gives `slot` back. Work already on `readers` may still read it; `keeps_contents` says whether
  // its owner may take it back as it is.
  void release(Slot& slot, Stream& readers, bool keeps_contents);

  // Forgets what all released slots hold: the parameters have changed.
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
