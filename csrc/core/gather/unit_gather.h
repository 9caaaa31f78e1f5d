// The state of one unit's parameters: sharded, on their way, or unsharded. Only the gatherer
// and its slots change it, apart from what users see between steps.
//
// Note [states]
// Sharded -> Gathering (a gather was issued, or a slot with current contents was reacquired) ->
// Unsharded (the compute stream waited and the parameters are attached) -> Sharded. A gather covers
// a whole bucket. Each of its units is resharded by itself, and the last one releases the slot.
// Reducing gradients does not touch the parameters, so it is not a state. Reductions have events of
// their own.
//
// Note [after an evaluation]
// A user may write into the parameters that the modules have, or give them to an optimizer. Between
// steps the modules need the sharded parameters. So a forward without gradients reshards all units,
// even those that stay unsharded if a backward follows. If the user asked for
// reshard_after_forward=False, the unit keeps its slot for the next evaluation, but it is put away:
// users see its sharded parameters. There are exceptions:
// - Under FSDP1's NO_SHARD no slot is kept. PyTorch's FSDP1 casts the parameters in each forward,
//   and so sees writes that do not change the version.
// - After an exception every unit is put away.
// - A unit that the user has unsharded with unshard() stays as it is.
// - Replays of a CUDA graph write slots, and change shards without a new version. So a forward that
//   is captured, and each forward after that, gathers all units anew.
// - A backward with create_graph=True puts its units away, because a second backward may read their
//   slots. The next forward gathers these units anew: their shards may have changed without a new
//   version.
#pragma once

#include <cstdint>

#include "core/memory/buffer_ring.h"
#include "core/units/unit_port.h"

namespace fsdp {

enum class UnitState : std::uint8_t { Sharded, Gathering, Unsharded };

class UnitGather {
 public:
  UnitState state() const { return state_; }
  bool is_sharded() const { return state_ == UnitState::Sharded; }
  bool is_unsharded() const { return state_ == UnitState::Unsharded; }
  bool is_speculative() const { return is_speculative_; }  // prefetched and not used yet
  bool is_put_away() const { return put_away_ != PutAway::No; }
  bool is_put_away_by_backward() const { return put_away_ == PutAway::ByBackward; }
  bool is_held() const { return is_held_; }   // unsharded by the user, not by a forward
  const Slot* slot() const { return slot_; }  // of the bucket, while this unit uses it
  // Of its shards, when a forward began or a gather was issued.
  std::uint64_t followed_version() const { return followed_version_; }

  // Both are for unsharded units: Note [after an evaluation].
  void set_held_by_user(bool by_user) { is_held_ = by_user; }
  void put_away(UnitPort& port, bool by_backward = false) {
    if (is_unsharded() && !is_put_away() && !is_held_) {
      put_away_ = by_backward ? PutAway::ByBackward : PutAway::BetweenSteps;
      port.show_sharded();
    }
  }

 private:
  friend class Gatherer;
  friend class GatherSlots;

  enum class PutAway : std::uint8_t { No, BetweenSteps, ByBackward };

  UnitState state_ = UnitState::Sharded;
  bool is_speculative_ = false;
  PutAway put_away_ = PutAway::No;
  bool is_held_ = false;
  Slot* slot_ = nullptr;
  std::uint64_t gathered_version_ = 0;  // of its shards, when the bucket was gathered last
  std::uint64_t followed_version_ = 0;  // of its shards, as the gather stream may read them
  std::uint64_t inputs_iteration_ = 0;  // the gatherer's, when the port computed inputs last
  std::uint64_t inputs_version_ = 0;    // of its shards, at that time
};

}  // namespace fsdp
