// Units that share their collectives: one gather for the parameters of all of them, one reduction
// for their gradients. A unit that is large enough by itself is a bucket of its own.
//
// Note [buckets]
// Every collective has a latency, whatever its size. So small units that run one after another
// (core/units/merging.h) are adjacent in memory: their flat shards are one input of a gather, their
// flat gradients one output of a reduction. For the collectives, a bucket is one unit with all
// their parameters (UnitLayout::joined). It is gathered when its first unit is needed; the other
// units stay in the state Gathering until forward or backward reaches them. Its slot is released
// when the last unit is resharded. It is reduced when the last of the units that ran has all its
// gradients. Gradients are kept until then.
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

#include "core/gather/bucket_gather.h"
#include "core/lanes.h"
#include "core/memory/layout.h"
#include "core/memory/memory_plan.h"
#include "core/record/ledger.h"
#include "core/reduce/bucket_reduction.h"
#include "core/units/bucket_names.h"
#include "core/units/unit.h"
#include "device/stream.h"

namespace fsdp {

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

  // Whether the user has a sharded gradient of a unit, or may read one.
  bool uses_gradient_memory() const;
  // Frees the memory of the sharded gradients until renew_gradients, which then gets memory of
  // `stream`, a native handle: Note [lent gradients] in core/reduce/reducer.h.
  void lend_gradients(void* stream);
  bool has_lent_gradients() const { return gradient_bytes() > 0 && flat_gradient() == nullptr; }
  // The native handle of the stream whose pool of the allocator has the gradients' memory.
  void* gradient_stream() const { return *units.front()->gradient_stream; }
  std::shared_ptr<void> allocate_gradients(Device& device, Stream& stream) const;
  // Gives the units' sharded gradients memory that was allocated for gradient_stream(): Note [held
  // gradients], Note [lent gradients].
  void renew_gradients(const std::shared_ptr<void>& memory);

  UnitRange numbers() const { return {units.front()->number, units.back()->number}; }
  const void* flat_shard() const;
  void* flat_gradient() const;

  // The size of the buffers that this bucket does not share and that exist now.
  std::size_t buffer_bytes() const;

  // The bucket's buffers, with the units' current settings.
  BucketUse use() const;

  const int number;
  const std::vector<Unit*> units;  // in the order that forward runs them
  const std::string name;
  const UnitLayout layout;
  const std::uint64_t identity;  // the same on all ranks: Note [collective tags]
  const Mesh* const mesh;        // of all units; null: the root's. Note [several meshes]
  BucketGather gather;
  BucketReduction reduction;
  const BucketBuffers buffers;  // their planned sizes
  const BucketRanges ranges;
  bool is_awaited = false;  // by BackwardSchedule, in this backward
};

std::vector<BucketUse> uses_of(const std::vector<std::unique_ptr<Bucket>>& buckets);
// Whether some have gradients of backwards without gradient sync.
bool have_accumulated(const std::vector<std::unique_ptr<Bucket>>& buckets);
// Whether units are on several meshes. Buckets may then have other sizes on other ranks: Note
// [several meshes].
bool has_several_meshes(const std::vector<std::unique_ptr<Bucket>>& buckets);

}  // namespace fsdp
