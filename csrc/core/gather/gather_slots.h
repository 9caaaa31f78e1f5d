// The slots that buckets are gathered into: of the ring, outside it if it has no room, and the
// persistent slots of buckets that stay unsharded after forward. See Note [slot lifetime] in
// core/memory/buffer_ring.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/lanes.h"
#include "core/memory/buffer_ring.h"
#include "core/memory/pieces.h"
#include "core/record/ledger.h"
#include "core/units/bucket.h"
#include "device/stream.h"

namespace fsdp {

class GatherSlots {
 public:
  // All of these outlive this.
  GatherSlots(Device& device, Lane& lane, LaneStreams& streams, Ledger& ledger);

  // Frees the ring, and persistent slots that are no longer needed. Then allocates a ring, and the
  // persistent slots that are missing. `buckets` lives until the next call.
  void plan(const std::vector<std::unique_ptr<Bucket>>& buckets, RingPlan ring);
  // Blocks until nothing reads a slot.
  void wait_for_readers();

  // Returns the slot that the bucket has released, if its contents are still current: Note [lazy
  // reshard] in core/gather/gatherer.h. Null otherwise.
  Slot* reacquire(Bucket& bucket, std::uint64_t iteration);
  // Returns a slot for the next gather of the bucket. If none is free, `on_demand` reclaims the
  // slot of a prefetch or allocates one outside the ring. Otherwise the result is null.
  Slot* acquire(Bucket& bucket, bool on_demand);
  // As Gatherer::note_read.
  void note_read(const Unit& unit);
  // Takes back a slot that no unit uses now.
  void release(Slot& slot, Bucket& bucket);

  const BufferRing* ring() const { return ring_.get(); }  // null before the first plan
  bool poisons_released() const { return poison_; }
  void set_poison_released(bool value) { poison_ = value; }

 private:
  Slot* acquire_in_ring(const Bucket& bucket, bool on_demand);
  Slot* acquire_persistent_slot(Bucket& bucket);
  static bool has_reclaimable_slot(const Bucket& bucket);
  void abandon_gather(Bucket& bucket);
  template <typename Visit>
  void for_each_reader(const Slot& slot, const Visit& visit);
  void follow_readers(Slot& slot, const Bucket& bucket);
  void count_if_dropped(Bucket& bucket);
  void allocate_persistent_slots(const std::vector<std::unique_ptr<Bucket>>& buckets);
  void make_persistent_slot(Bucket& bucket, std::shared_ptr<void> memory);

  Device& device_;
  Lane& lane_;
  LaneStreams& streams_;
  Ledger& ledger_;
  const std::vector<std::unique_ptr<Bucket>>* buckets_ = nullptr;
  std::unique_ptr<BufferRing> ring_;
  std::unique_ptr<Event> read_;  // recorded and waited for within wait_for_readers
  bool poison_ = false;
};

}  // namespace fsdp
