// The messages of a bucket and the buffers that they need, from its layout and settings alone. Pure
// arithmetic: no memory, no device. The bucket, the gatherer and the reducer send and allocate what
// this says, and core/units/bucket_plan.h adds it up before training.
#pragma once

#include <cstddef>
#include <vector>

#include "core/memory/layout.h"
#include "core/memory/ring_plan.h"

namespace fsdp {

// The buffers of one bucket, in bytes on each rank.
struct BucketBuffers {
  std::size_t slot = 0;     // of unsharded parameters; 0: one rank without a cast uses its shard
  std::size_t staging = 0;  // gathered messages are unpacked from here
  std::size_t gather_input = 0;  // if it is kept: Note [gather inputs] in core/gather/gatherer.h
  std::size_t group_shard = 0;   // kept between forward and backward: Note [group shards]
  std::size_t reduce_input = 0;
  std::size_t reduce_output = 0;    // of all messages
  std::size_t message_output = 0;   // of the largest message
  std::size_t gradients = 0;        // unsharded, of all its trainable parameters
  std::size_t gather_messages = 1;  // of gathers over all ranks
  bool gathers_in_pieces = false;   // over all ranks or over a smaller group
  std::size_t reduce_messages = 1;
};

// The largest messages, in bytes of all ranks together; 0: any size. A reduction's message has at
// least one row of each rank.
struct MessageLimits {
  std::size_t gather = 0;
  std::size_t reduce = 0;

  bool operator==(const MessageLimits& other) const {
    return gather == other.gather && reduce == other.reduce;
  }
};

// The parts of a bucket's parameters that its messages carry, at least one. A part of a reduction
// has a trainable parameter, unless the bucket has none.
std::vector<LayoutPart> gather_parts(const UnitLayout& layout, MessageLimits limits);
std::vector<LayoutPart> reduce_parts(const UnitLayout& layout, MessageLimits limits);

// The group that a bucket is resharded to after forward: Note [group shards] in
// core/gather/bucket_gather.h.
struct SmallerGroup {
  int ranks = 0;  // 0: there is none
  GatherBy by = GatherBy::Packing;
};

BucketBuffers buffers_of(const UnitLayout& layout, GatherBy by, MessageLimits limits,
                         const SmallerGroup& group = {});

// Whether reductions can write the flat gradient if there is no gradient to add to. Otherwise they
// write the reduce output.
bool reduces_in_place(const UnitLayout& layout, double post_scale);

struct BucketUse {
  BucketBuffers buffers;
  bool reshards_after_forward = true;  // otherwise it has a slot of its own
  bool reads_whole_output = false;     // as UnitSettings::reads_whole_output, of one of its units

  // 0: it has none.
  std::size_t bytes_in_ring() const { return reshards_after_forward ? buffers.slot : 0; }
};

// The buffers that all buckets share.
struct GatherMemory {
  RingPlan ring;
  std::size_t staging_bytes = 0;
  bool keeps_inputs = true;  // Note [gather inputs] in core/gather/gatherer.h
  std::size_t kept_input_bytes = 0;
  bool any_in_pieces = false;  // among the buckets that have slots
};
struct ReduceMemory {
  std::size_t input_bytes = 0;
  std::size_t output_bytes = 0;  // two halves, with pieces or replicas
  bool any_in_pieces = false;
  bool packs_ahead = false;  // Note [packing ahead] in core/reduce/reducer.h
  // The limit of unsharded gradients, in bytes, of two buckets together: the one in backward, and
  // the one whose packing is in flight. See Note [gradient lifetime] in
  // core/reduce/packed_gradients.h.
  std::size_t most_gradients = 0;
};

// One slot for each bucket that can be in use at once, and one for each prefetch. `nesting` is how
// many units below the root enclose each other at most. A root that reshards after forward needs a
// slot of the ring as well, unless it has no parameters.
inline int ring_slots(int nesting, std::size_t prefetch_depth, bool root_reshards,
                      const UnitLayout& root) {
  const bool has_root = root_reshards && root.unsharded_bytes() > 0;
  return nesting + static_cast<int>(prefetch_depth) + (has_root ? 1 : 0);
}

// `slots` limits the slots of the ring, which never has more slots than buckets that use them.
// `together`: Note [ring places] in core/memory/ring_plan.h; empty if it is not known.
// `keeps_inputs`: Note [gather inputs] in core/gather/gatherer.h.
GatherMemory plan_gathers(const std::vector<BucketUse>& buckets, int slots,
                          const BucketSets& together = {}, bool keeps_inputs = true);
// `may_pack_ahead`: on several ranks of a device that overlaps copies. `has_replicas`: Note
// [replicas] in core/reduce/reducer.h.
// `in_pieces_elsewhere`: buckets of another rank travel in pieces.
ReduceMemory plan_reductions(const std::vector<BucketUse>& buckets, bool may_pack_ahead,
                             bool has_replicas = false, bool in_pieces_elsewhere = false);

}  // namespace fsdp
