// Units that share their collectives: one gather for the parameters of all of them, one reduction
// for their gradients. A unit that is large enough by itself is a bucket of its own.
//
// Note [buckets]
// Every collective has a latency, whatever its size. So small units that run one after another
// (core/merging.h) are adjacent in memory: their flat shards are one input of a gather, their flat
// gradients one output of a reduction. For the collectives, a bucket is one unit with all their
// parameters (UnitLayout::joined). It is gathered when its first unit is needed; the other units
// stay in the state Gathering until forward or backward reaches them. Its slot is released when the
// last unit is resharded. It is reduced when the last of the units that ran has all its gradients.
// Gradients are kept until then.
//
// Note [moving shards]
// A unit's flat shard starts as an allocation of its own, because it is made before the neighbours
// are known. Forming buckets moves it into an allocation that they share: the content is copied and
// the storages point there, so that every tensor over it (parameters, the optimizer's) follows.
// This happens between iterations, when no stream works with the shard and no other rank reads it.
// It happens once for the order of registration and once for the recorded order, and not at all for
// units that are adjacent already. Flat gradients move in the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/accumulated_gradients.h"
#include "core/buffer_ring.h"
#include "core/gather_source.h"
#include "core/group_shard.h"
#include "core/lanes.h"
#include "core/layout.h"
#include "core/ledger.h"
#include "core/memory_plan.h"
#include "core/merging.h"
#include "core/unit.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// One message of a reduction and the copies around it.
struct ReducePiece {
  LayoutPart part;
  PackPlan pack_plan;
  CastPlan finish_plan;                // reduce output -> flat gradient, by trainable parameter
  std::size_t first_trainable = 0;     // index among the bucket's trainable parameters
  std::int64_t gradient_offset = 0;    // elements of the gradient before the piece's rows
  std::int64_t segment_offset = 0;     // elements, in the bucket's segment
  std::vector<DType> gradient_dtypes;  // of its gradients, each once
};

// The names of a bucket's ranges in profilers' timelines. Ranges that FSDP2 has, too, have its
// names.
struct BucketRanges {
  explicit BucketRanges(const std::string& bucket)
      : all_gather(range_name("all_gather", bucket)),
        accumulate(range_name("post_backward_accumulate", bucket)),
        reduce(range_name("post_backward_reduce", bucket)),
        reduce_scatter(range_name("reduce_scatter", bucket)),
        all_reduce(range_name("all_reduce", bucket)) {}

  const std::string all_gather;
  const std::string accumulate;
  const std::string reduce;  // with the packing
  const std::string reduce_scatter;
  const std::string all_reduce;
};

struct Bucket {
  Bucket(int number, std::vector<Unit*> units, Lanes& lanes);

  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;

  // Makes the units' shards and gradients adjacent and sets the units' places in the bucket.
  void place_units(Lanes& lanes);

  // Move the units' shards or gradients, which are adjacent, into memory of the same size.
  std::size_t shard_bytes() const;
  std::size_t gradient_bytes() const;
  void move_shards(const std::shared_ptr<void>& memory);
  void move_gradients(const std::shared_ptr<void>& memory);

  // Gives the units' sharded gradients new memory: Note [held gradients].
  void renew_gradients(Device& device);

  UnitRange numbers() const { return {units.front()->number, units.back()->number}; }
  const void* flat_shard() const;
  void* flat_gradient() const;

  std::size_t segment_bytes() const;       // of one rank's segment of the reduce input
  std::size_t reduce_input_bytes() const;  // of all ranks'
  std::size_t reduce_input_bytes(const ReducePiece& piece) const;
  // Whether its gathers use separate streams for copies. If one kind of gather is in pieces, from
  // all ranks or from a smaller group, both kinds use these streams, which keeps them in order.
  bool gathers_in_pieces() const {
    return all_ranks.pieces.size() > 1 || (group != nullptr && group->source.pieces.size() > 1);
  }
  bool reduces_in_pieces() const { return reductions.size() > 1; }
  // The size of the buffers that this bucket does not share and that exist now.
  std::size_t buffer_bytes() const;

  // The bucket's buffers, with the units' current settings.
  BucketUse use() const { return {buffers, units.front()->reshard_after_forward}; }

  const int number;
  const std::vector<Unit*> units;  // in the order that forward runs them
  const std::string name;
  const UnitLayout layout;
  const std::uint64_t identity;  // the same on all ranks: Note [collective tags]
  const Mesh* const mesh;        // of all units; null: the root's. Note [several meshes]
  Communicator& reduces_over;    // the ranks of that mesh
  const BucketBuffers buffers;   // their planned sizes

  const GatherSource all_ranks;              // of the mesh
  std::vector<ReducePiece> reductions;       // at least one
  const std::vector<DType> gradient_dtypes;  // of each trainable parameter, unsharded

  // - Parameters.
  Slot* slot = nullptr;        // of the last gather: in the ring, or the home
  std::unique_ptr<Slot> home;  // if the bucket stays unsharded after forward
  Issue gather_issue;
  ShardStamp gathered_from;
  std::shared_ptr<void> gather_input;  // only if the wire has another dtype than the shard
  ShardStamp cast_from;
  std::unique_ptr<GroupShard> group;               // only if it is resharded to a smaller group
  const GatherSource* gathered_over = &all_ranks;  // by the last gather

  // - Gradients. The vectors have one element for each trainable parameter.
  AccumulatedGradients accumulated;
  // The native handles of the streams on which gradients arrived that are not packed yet.
  std::vector<void*> gradient_streams;
  std::vector<const void*> gradients;           // addresses, for the packer
  std::vector<const void*> gradients_of_dtype;  // scratch, for pieces of several gradient dtypes
  std::vector<CastMode> finish_modes;
  std::unique_ptr<Event> packed;
  std::unique_ptr<Event> reduced;
  bool reduction_pending = false;    // the compute stream has not waited for `reduced` yet
  bool reduces_into_window = false;  // on all ranks: Note [shards and gradients in windows]
  bool is_awaited = false;           // by ReductionOrder, in this backward

  // - The names of its reductions in error messages.
  const std::string reduce_label;
  const std::string all_reduce_label;  // Note [replicas] in core/reducer.h
  const BucketRanges ranges;
};

std::vector<BucketUse> uses_of(const std::vector<std::unique_ptr<Bucket>>& buckets);
// Whether units are on several meshes. Buckets may then have other sizes on other ranks: Note
// [several meshes].
bool has_several_meshes(const std::vector<std::unique_ptr<Bucket>>& buckets);

}  // namespace fsdp
