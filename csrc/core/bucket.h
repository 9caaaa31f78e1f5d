// Units that travel together: one gather brings the parameters of all, one reduction takes the
// gradients of all. A unit that is large enough by itself is a bucket of its own.
//
// Note [buckets]
// A collective costs its latency, whatever it carries. So units that are small and run one after
// the other (core/merging.h) lie one behind the other in memory: their flat shards are one input of
// a gather, their flat gradients one output of a reduction. To the wire a bucket is a unit with the
// parameters of all of them (UnitLayout::joined). It is gathered when the first of its units is
// needed; the others are Gathering until their turn comes. Its slot goes back when the last of them
// has let go. It is reduced when the last of those that ran has all its gradients, which are kept
// until then.
//
// Note [moving shards]
// A unit's flat shard begins as an allocation of its own, since it is made before it is known who
// its neighbours are. When buckets are formed it moves into one that they share: its content is
// copied and its storage is pointed there, so that every tensor over it (parameters, what an
// optimizer works on) follows. That is between iterations, when no stream works with it and no
// other rank reads it; it happens once for the order of registration and once for the recorded one,
// and not at all where the units lie as they should already. Flat gradients move the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/buffer_ring.h"
#include "core/lanes.h"
#include "core/layout.h"
#include "core/ledger.h"
#include "core/memory_plan.h"
#include "core/merging.h"
#include "core/unit.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// Which state of the shards something was made from.
struct ShardStamp {
  std::uint64_t iteration = 0;
  std::uint64_t version = 0;  // of all units' shards
  bool valid = false;

  bool matches(const ShardStamp& other) const {
    return valid && other.valid && iteration == other.iteration && version == other.version;
  }
};

// What one message of a gather carries, and the copies around it: Note [pieces].
struct GatherPiece {
  LayoutPart part;
  CastPlan cast_plan;
  GatherPlan plan;
  std::size_t bytes = 0;            // on the wire, of all ranks together
  std::unique_ptr<Event> gathered;  // in its place
};

// What one message of a reduction carries.
struct ReducePiece {
  LayoutPart part;
  PackPlan pack_plan;
  CastPlan finish_plan;              // reduce output -> flat gradient, by trainable parameter
  std::size_t first_trainable = 0;   // of the bucket's
  std::int64_t gradient_offset = 0;  // elements of a gradient that lie before its rows
  std::int64_t segment_offset = 0;   // elements, in the bucket's segment
};

struct Bucket {
  // Takes the units in: makes them neighbours and sets their places.
  Bucket(int number, std::vector<Unit*> units, Lanes& lanes);

  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  UnitRange numbers() const { return {units.front()->number, units.back()->number}; }
  const void* flat_shard() const;
  void* flat_gradient() const;

  std::size_t segment_bytes() const;       // of one rank's part of the reduce input
  std::size_t reduce_input_bytes() const;  // of all ranks'
  std::size_t reduce_input_bytes(const ReducePiece& piece) const;
  bool gathers_in_pieces() const { return gathers.size() > 1; }
  bool reduces_in_pieces() const { return reductions.size() > 1; }
  // Of the buffers that belong to this bucket alone and exist now.
  std::size_t buffer_bytes() const;

  // As the settings are now.
  BucketUse use() const { return {buffers, units.front()->reshard_after_forward}; }
  void note_last_pieces();

  const int number;
  const std::vector<Unit*> units;  // in the order that forward runs them
  const std::string name;
  const UnitLayout layout;
  const BucketBuffers buffers;  // how large each is to be

  // - Descriptors, made once. At least one piece of each.
  std::vector<GatherPiece> gathers;
  std::vector<ReducePiece> reductions;
  DType gradient_dtype = DType::Float32;  // of the unsharded parameters'

  // - Parameters.
  Slot* slot = nullptr;        // that was gathered into last: the ring's, or the home
  std::unique_ptr<Slot> home;  // of a bucket that stays unsharded after forward
  Issue gather_issue;
  ShardStamp gathered_from;
  std::shared_ptr<void> gather_input;  // only where the wire has another dtype than the shard
  ShardStamp cast_from;

  // - Gradients. The vectors have one element for each trainable parameter.
  // Reduce input that outlives a backward without sync: one piece's behind the other's.
  std::shared_ptr<void> accumulated;
  std::vector<char> accumulated_params;
  bool has_accumulated = false;
  std::vector<const void*> gradients;  // addresses of those taken for the packer
  std::vector<CastMode> finish_modes;
  std::unique_ptr<Event> packed;
  std::unique_ptr<Event> reduced;
  bool reduction_pending = false;  // the compute stream has not waited for `reduced` yet

  // - What waits are for, in error messages.
  const std::string gather_label;
  const std::string reduce_label;
};

std::vector<BucketUse> uses_of(const std::vector<std::unique_ptr<Bucket>>& buckets);

}  // namespace fsdp
