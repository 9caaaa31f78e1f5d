// How a bucket's parameters are gathered, and the state of its last gather, which only the gatherer
// and its slots change.
//
// Note [group shards]
// With reshard_after_forward=k, the N ranks that share a bucket form N / k groups of k consecutive
// ranks. After forward each rank keeps 1/k of the unsharded buffer, as it lies in the slot: the
// chunks of N / k ranks from each region. This part is a gather input of the bucket's layout over k
// ranks (UnitLayout::regrouped), whose unsharded buffer has the same bytes at the same places. So
// later gathers of the iteration need only the ranks of one group, and their results are the same
// bits.
//
// - The copy runs on the stream of the messages, after the gather and before any later gather into
//   the slot. The compute stream waits for the copy only before writing to the slot or freeing it.
// - Gathers of a group run on the stream of the gather lane, too, but over a communicator of their
//   own. All ranks issue the gathers of all groups at the same place in the order of that lane,
//   whose history, comparisons and tags cover them.
// - What is kept is valid as long as a slot's contents are (Note [lazy reshard]), and for one
//   backward. A reshard() by the user invalidates it, because the user may have written through
//   `.data`. A forward without gradients makes no group shards, because no backward follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/lanes.h"
#include "core/memory/buffer_ring.h"
#include "core/memory/layout.h"
#include "core/memory/memory_plan.h"
#include "core/record/ledger.h"
#include "core/units/unit.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// Identifies the shard values in a gather or a copy, by iteration and version.
struct ShardStamp {
  std::uint64_t iteration = 0;
  std::uint64_t version = 0;  // the sum over the units' shards
  bool valid = false;

  bool matches(const ShardStamp& other) const {
    return valid && other.valid && iteration == other.iteration && version == other.version;
  }
};

// One message of a gather, with its cast before and its unpacking after: Note [pieces].
struct GatherPiece {
  LayoutPart part;
  CastPlan cast_plan;  // into the gather input
  // The same to this rank's part of the output: Note [gather inputs] in core/gather/gatherer.h.
  CastPlan cast_into_slot;
  CastPlan cast_into_staging;
  GatherPlan plan;
  std::size_t bytes = 0;            // on the wire, of all ranks together
  std::unique_ptr<Event> gathered;  // and unpacked
};

// The source of a bucket's parameters: all ranks of its mesh, or a smaller group.
struct GatherSource {
  // `op` is AllGather, or GroupAllGather for a smaller group. `layout` is that of the bucket of
  // `units` over the ranks of the communicator.
  GatherSource(Collective op, Communicator& communicator, const UnitLayout& layout,
               const std::vector<Unit*>& units, std::string label, Lanes& lanes);

  bool is_of_group() const { return op == Collective::GroupAllGather; }
  const GatherPiece& last_piece() const { return pieces.back(); }
  // The last piece that has parameters of the unit.
  const GatherPiece& last_piece(const Unit& unit) const {
    return pieces[last_pieces[unit.position]];
  }

  const Collective op;
  Communicator& communicator;
  const std::string label;                     // in error messages
  const std::vector<GatherPiece> pieces;       // at least one
  const std::vector<std::size_t> last_pieces;  // for each unit
  const std::size_t bytes;                     // of all pieces
};

// The part of a bucket that a rank keeps between forward and backward: Note [group shards].
struct GroupShard {
  GroupShard(Communicator& group, const UnitLayout& of_bucket, const std::vector<Unit*>& units,
             std::string label, Lanes& lanes)
      : layout(of_bucket.regrouped(group.size())),
        source(Collective::GroupAllGather, group, layout, units, std::move(label), lanes),
        keep_plan(layout.keep_plan(group.rank())),
        kept(lanes.device->new_event()) {
    lanes.packer->prepare(keep_plan);
  }

  const UnitLayout layout;  // of the bucket, over the group
  const GatherSource source;
  UnpackPlan keep_plan;

  std::shared_ptr<void> memory;  // layout.gather_bytes()
  ShardStamp kept_from;          // the shards that it was made from
  std::unique_ptr<Event> kept;   // the copy has run
  bool is_due = false;           // the slot's contents are kept when it is released
};

class BucketGather {
 public:
  // `layout` is that of the bucket of `units`.
  BucketGather(const UnitLayout& layout, const std::vector<Unit*>& units, Lanes& lanes);

  BucketGather(const BucketGather&) = delete;
  BucketGather& operator=(const BucketGather&) = delete;

  const GatherSource& all_ranks() const { return all_ranks_; }  // of the mesh
  // Null unless the bucket is resharded to a smaller group after forward.
  const GroupShard* group() const { return group_.get(); }
  // Of the last gather.
  const GatherSource& source() const { return *source_; }
  // Whether its gathers use separate streams for copies. If one kind of gather is in pieces, from
  // all ranks or from a smaller group, both kinds use these streams, which keeps them in order.
  bool is_in_pieces() const {
    return all_ranks_.pieces.size() > 1 || (group_ != nullptr && group_->source.pieces.size() > 1);
  }

  // In the ring, or the persistent slot. Null if it is released.
  const Slot* slot() const { return slot_; }
  // The slot of a bucket that stays unsharded after forward.
  const Slot* persistent_slot() const { return persistent_slot_.get(); }
  // The size of the buffers that the bucket does not share and that exist now.
  std::size_t buffer_bytes(const BucketBuffers& planned) const;

 private:
  friend class Gatherer;
  friend class GatherSlots;

  const GatherSource all_ranks_;
  const std::unique_ptr<GroupShard> group_;
  const GatherSource* source_ = &all_ranks_;
  Slot* slot_ = nullptr;
  std::unique_ptr<Slot> persistent_slot_;
  Issue issue_;
  bool is_unused_ = false;  // no unit has been attached since the last gather was issued
  ShardStamp gathered_from_;
  std::shared_ptr<void> input_;  // if it is kept: Note [gather inputs] in core/gather/gatherer.h
  ShardStamp cast_from_;
};

}  // namespace fsdp
