// How a bucket's parameters are gathered, and the state of its last gather, which only the gatherer
// changes.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/gather/gather_source.h"
#include "core/gather/group_shard.h"
#include "core/lanes.h"
#include "core/memory/buffer_ring.h"
#include "core/memory/memory_plan.h"
#include "core/record/ledger.h"
#include "core/units/unit.h"

namespace fsdp {

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
