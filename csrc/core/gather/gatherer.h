// Gathers a bucket's parameters and releases them: slots, casts, all-gathers, unpacking. The
// schedule decides when.
//
// Note [lazy reshard]
// A bucket can be unsharded again without a collective if no other bucket has used its released
// slot, the iteration is the same and its shards have not changed. Nothing is reused across
// iterations, because not every change of the shards is visible: writes through `.data`,
// torch._foreach_ functions and fused optimizers do not change a DTensor's version. After such a
// change within an iteration, users call reshard(), which invalidates what was gathered.
//
// Note [gather inputs]
// Where the wire has another dtype than the shard, or the shard is in the host's memory, a bucket
// is sent from a cast copy. If buckets keep their copies (`keeps_inputs`), backward sends what
// forward has cast. Otherwise shards are cast for each gather, to where this rank's part of the
// output is, and the gather is in place. That takes no memory. It costs one more pass over the
// shard, in front of the message.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/gather/gather_slots.h"
#include "core/lanes.h"
#include "core/memory/pieces.h"
#include "core/record/ledger.h"
#include "core/units/bucket.h"

namespace fsdp {

class Announcer;

class Gatherer {
 public:
  // All of these outlive this, and others may use the lane, too.
  Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announcer& announcer);
  ~Gatherer();

  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Allocates a ring for `buckets`, and frees the previous one. No slot may have an owner.
  // `buckets` lives until the next call. `together`: see plan_gathers. `keeps_inputs`: Note [gather
  // inputs].
  void plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots,
                   const BucketSets& together, bool keeps_inputs);

  // Gathers from now on start after the work of the compute stream so far (the optimizer's).
  // Parameters that were gathered earlier are out of date, unless the iteration `goes_on`.
  void begin_iteration(bool goes_on = false);
  // Reshards units that stayed unsharded although their shards have changed since. Returns whether
  // any shards have changed since the last call. Then the graphs of earlier forwards are out of
  // date.
  bool reshard_outdated(const std::vector<std::unique_ptr<Unit>>& units);
  // Blocks until the lane is idle and nothing reads a slot.
  void synchronize();
  // Blocks until no gather reads the host's memory: Note [offloaded units] in core/memory/layout.h.
  void finish_reading_host();
  // In a CUDA graph capture, and in every pass after one of any model on the lane, makes the
  // compute stream wait for all work of the lane.
  void join_capture();
  // Whether a CUDA graph has captured a step of this model, whose buffers must stay.
  bool has_been_captured() const { return has_been_captured_; }

  // Issues the gather of the unit's bucket if the unit is sharded. The bucket's other units are
  // prefetched with it. If no slot is free, a prefetch (`on_demand` is false) returns false. A
  // gather on demand reclaims the slot of a prefetch, or gets a slot outside the ring.
  bool unshard(Unit& unit, bool on_demand);
  // Makes the compute stream wait for the gather and attaches the parameters. Returns whether there
  // was a gather to wait for.
  bool attach(Unit& unit);
  // Notes that the current compute stream reads the unit's parameters: Note [slot lifetime]. If
  // other streams read the slot, too, all of them wait for the whole gather.
  void note_read(Unit& unit) { slots_.note_read(unit); }
  // Makes the unit sharded, from any state.
  void reshard(Unit& unit);
  // When the slot of the unit's bucket is released next, its contents are kept for backward, if the
  // user has asked for that: Note [group shards] in core/gather/bucket_gather.h.
  void keep_for_backward(Unit& unit);
  // Slots that are released from now on are not kept.
  void end_keeping();
  // Marks all group shards as out of date.
  void invalidate_group_shards();
  // Marks everything that was gathered, cast or kept from the bucket's shards as out of date.
  void invalidate(Bucket& bucket);
  // Reshards the bucket's units that were prefetched and not used, which would retain its slot.
  void reshard_speculative(Bucket& bucket);

  const BufferRing* ring() const { return slots_.ring(); }
  std::size_t staging_bytes() const { return staging_.bytes(); }
  bool keeps_inputs() const { return keeps_inputs_; }  // Note [gather inputs]
  // Forgets the issue times and refusals of the previous iteration.
  static void reset_issues(const std::vector<std::unique_ptr<Bucket>>& buckets);
  // For tests: fills slots with NaN at release, so that a use after release shows in results.
  void set_poison_released_slots(bool value) { slots_.set_poison_released(value); }

 private:
  // Where a piece's messages arrive: directly in the slot, or packed in the staging buffer.
  struct Output {
    char* slot;
    char* staging;
  };

  bool is_current(Unit& unit) const;
  bool start_unshard(Unit& unit, bool on_demand);
  void note_issue(Bucket& bucket, const Slot* slot, bool on_demand);
  void retain_slot(Bucket& bucket);
  template <typename Visit>
  void for_each_group_shard(const Visit& visit);
  // Call it before the bucket releases the slot.
  void keep_group_shard(Bucket& bucket, const Slot& slot);

  void compute_inputs(Unit& unit);
  void gather_into(Bucket& bucket, Slot& slot);
  void gather_from_ranks(Bucket& bucket, Slot& slot);
  void order_before_gather(const Bucket& bucket);
  static bool gathers_in_place(const Bucket& bucket);
  void gather_piece(const Bucket& bucket, std::size_t number, const Output& output);
  static const void* input_of(const Bucket& bucket);
  void set_parts(const Bucket& bucket, const GatherPlan& plan, const Output& output);
  void send(const Bucket& bucket, std::size_t number, const Output& output);
  void cast(const Bucket& bucket, const GatherPiece& piece, const Output& output, Stream& stream);
  void place_shards(const std::vector<std::unique_ptr<Bucket>>& buckets);
  void allocate_group_shards(const std::vector<std::unique_ptr<Bucket>>& buckets);
  void allocate_gather_inputs(const std::vector<std::unique_ptr<Bucket>>& buckets,
                              const GatherMemory& memory, bool may_differ);
  void wait_for_gather(Unit& unit);
  void discard_failed_gather(Bucket& bucket);

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  LaneStreams streams_;
  Ledger& ledger_;
  Announcer& announcer_;
  const std::vector<std::unique_ptr<Bucket>>* buckets_ = nullptr;
  bool is_any_offloaded_ = false;
  bool has_been_captured_ = false;
  GatherSlots slots_;
  HalvedBuffer staging_;  // rank-major
  bool keeps_inputs_ = true;
  std::vector<GatherPart> parts_;  // of the message that is sent; kept for its memory
  std::uint64_t iteration_ = 0;
};

}  // namespace fsdp
