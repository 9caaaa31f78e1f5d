// What a bucket sends and which buffers that takes, from its layout and the settings alone. Pure
// arithmetic; no memory, no device. The bucket, the gatherer and the reducer send and allocate what
// this says, and a plan before training (csrc/torch/bindings/plan) shows it.
#pragma once

#include <cstddef>
#include <vector>

#include "core/layout.h"

namespace fsdp {

// Of one bucket. Bytes, of what each rank has.
struct BucketBuffers {
  std::size_t slot = 0;     // of unsharded parameters; 0: of one rank without a cast, its shard
  std::size_t staging = 0;  // where messages of its gather are unpacked from
  std::size_t gather_input = 0;  // where the wire has another dtype than the shard
  std::size_t reduce_input = 0;
  std::size_t reduce_output = 0;
  std::size_t gather_messages = 1;
  std::size_t reduce_messages = 1;
};

// Which parts of a bucket's parameters its messages carry, at least one part of each kind. Those
// of a reduction have something trainable in them, unless nothing has.
std::vector<LayoutPart> gather_parts(const UnitLayout& layout, std::size_t max_message_bytes);
std::vector<LayoutPart> reduce_parts(const UnitLayout& layout, std::size_t max_message_bytes);

BucketBuffers buffers_of(const UnitLayout& layout, GatherBy by, std::size_t max_message_bytes);

// Whether reductions can write the flat gradient, where there is no gradient yet to add to.
// Otherwise they write the reduce output.
bool reduces_in_place(const UnitLayout& layout, double reduce_scale);

struct BucketUse {
  BucketBuffers buffers;
  bool reshards_after_forward = true;  // else it has a slot of its own
};

// What all buckets share.
struct GatherMemory {
  int slots = 0;
  std::size_t slot_bytes = 0;
  std::size_t staging_bytes = 0;
  bool any_cut = false;  // of the buckets that have slots: their pieces use staging's two halves
};
struct ReduceMemory {
  std::size_t input_bytes = 0;
  std::size_t output_bytes = 0;
  bool any_cut = false;
};

// One slot for each bucket that can be in use at once, and one for each gather ahead of it.
// `nesting`: units below the root that enclose each other, at most. A root that reshards after
// forward holds a slot of the ring until then.
inline int ring_slots(int nesting, std::size_t prefetch_depth, bool root_reshards) {
  return nesting + static_cast<int>(prefetch_depth) + (root_reshards ? 1 : 0);
}

// `slots`: of the ring, as far as there are buckets for them.
GatherMemory plan_gathers(const std::vector<BucketUse>& buckets, int slots);
ReduceMemory plan_reductions(const std::vector<BucketUse>& buckets);

// Buckets whose gradients are taken and not known to be packed, at most: Note [gradient lifetime]
// in core/reducer.h.
constexpr std::size_t kGradientsInFlight = 2;

// How many bytes of unsharded gradients are alive at once, at most, where buckets run in order: of
// a bucket that is complete, those in flight, and those of the buckets that enclose it, which may
// have come before. `bytes`: of each bucket's gradients. `parents`: the bucket that encloses it,
// lower in number, or -1.
std::size_t gradients_in_flight(const std::vector<std::size_t>& bytes,
                                const std::vector<int>& parents);

}  // namespace fsdp
