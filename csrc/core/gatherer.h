// Brings one bucket's parameters together and lets them go: slots, casts, all-gathers, unpacking.
// When that happens is the pipeline's business.
//
// Note [lazy reshard]
// A bucket whose released slot nobody has taken is unsharded again without a collective, as long as
// it is the same iteration and its shards have not changed. Never across iterations: writes through
// `.data`, torch._foreach_ functions and fused optimizers leave no trace on a DTensor's version, so
// that only the start of a forward is a safe point to look at the shards anew.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/bucket.h"
#include "core/buffer_ring.h"
#include "core/lanes.h"
#include "core/ledger.h"

namespace fsdp {

class Gatherer {
 public:
  // Called right before a collective is issued.
  using Announce = std::function<void(const Bucket&, std::size_t bytes)>;

  // The lane outlives this, and may be shared with others.
  Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce);
  ~Gatherer();

  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // Sizes the ring for `buckets` (and frees the one before): `slots` slots of the largest one that
  // reshards after forward. Not while a slot has an owner. `buckets` lives until the next call.
  void plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots);

  // A new iteration: work issued so far on the compute stream (the optimizer's) comes before its
  // gathers, and nothing gathered earlier counts as current.
  void begin_iteration();
  // Where a CUDA graph is captured: the compute stream goes on behind all gathers.
  void join_capture();
  std::uint64_t iteration() const { return iteration_; }

  // Issues what it takes to unshard; does nothing unless sharded. What it brings of the bucket's
  // other units is gathered ahead. Without `on_demand` it gives up (returns false) where no slot is
  // free; with it, it takes the slot of a speculative gather, or one outside the ring.
  bool unshard(Unit& unit, bool on_demand);
  // Makes the compute stream wait and attaches the parameters. Returns whether there was a gather
  // to wait for.
  bool attach(Unit& unit);
  // Back to sharded, from any state.
  void reshard(Unit& unit);
  // Those of the bucket's units that nobody has asked for: they would keep its slot.
  void reshard_speculative(Bucket& bucket);
  // Whether the unsharded parameters are those of the shards as they are now, as far as known.
  bool is_current(Unit& unit);

  Stream& stream() { return stream_; }
  const BufferRing* ring() const { return ring_.get(); }
  std::size_t staging_bytes() const { return staging_bytes_; }
  // Fills slots with NaN at release, so that a use after release shows in results; for tests.
  void set_poison_released_slots(bool value) { poison_ = value; }

 private:
  void follow_compute();
  void wait_for_gather(const Unit& unit);
  bool bring(Unit& unit, bool on_demand);
  void note_issue(Bucket& bucket, const Slot* slot, bool on_demand);
  Slot* current_slot(Bucket& bucket);
  Slot* free_slot(Bucket& bucket, bool on_demand);
  Slot* home_of(Bucket& bucket);
  Slot* take_speculative_slot(int bucket);
  void gather_into(Bucket& bucket, Slot& slot);
  void gather_from_ranks(Bucket& bucket, Slot& slot);
  const char* gather_input(Bucket& bucket);
  void cast(const Bucket& bucket, const GatherPiece& piece, Stream& stream);
  void send(const Bucket& bucket, const GatherPiece& piece, const char* input, Slot& slot,
            char* staging);
  void hand_over(Stream& from, Stream& to, const std::string& what);
  void hold(Bucket& bucket);
  void let_go(Slot& slot, Bucket& bucket);
  void poison(Slot& slot);

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  Stream& stream_;  // the lane's
  Ledger& ledger_;
  Announce announce_;
  std::unique_ptr<Event> compute_reached_;
  std::unique_ptr<Event> gathers_reached_;
  const std::vector<std::unique_ptr<Bucket>>* buckets_ = nullptr;
  std::unique_ptr<BufferRing> ring_;
  std::unique_ptr<Event>
      handed_over_;  // between streams of the lane, issued and waited for at once
  // Rank-major. Pieces use the two halves in turns, everything else, in order on stream_, the
  // whole.
  std::shared_ptr<void> staging_;
  std::size_t staging_bytes_ = 0;
  std::unique_ptr<Event> unpacked_[2];  // of each half
  bool any_cut_ = false;                // of the buckets
  std::uint64_t iteration_ = 0;
  bool poison_ = false;
};

}  // namespace fsdp
