// How large the ring is, and where in it each bucket's slot lies. Pure arithmetic: no memory, no
// device.
//
// Note [ring places]
// Buckets differ in size: an embedding may be three times as large as a layer. If all slots were as
// large as the largest bucket, most of that memory would stay empty. So the ring is one piece of
// memory, and each bucket has a place in it that overlaps no bucket with which it is ever unsharded
// at once. With a prefetch depth of 1, two neighbours have to fit:
//
//   embedding         | embedding (forward begins)          |
//   layers 0, 1, ...  | even ones      |      | odd ones    |
//   head              | head                 | last layer   |
//
// The order of registration tells which buckets are unsharded at once
// (core/units/unsharded_together.h). The places are preferences: a step that leaves units out puts
// a bucket wherever there is room (core/memory/buffer_ring.h). If the first iteration runs units in
// another order, or if the user says what is prefetched, slots are equal.
#pragma once

#include <cstddef>
#include <vector>

namespace fsdp {

// Sets of buckets, by number. Buckets without a slot in the ring do not matter.
using BucketSets = std::vector<std::vector<int>>;

struct RingPlan {
  int slots = 0;               // buckets that are unsharded at once, at most
  std::size_t slot_bytes = 0;  // of the largest bucket
  std::size_t bytes = 0;       // of the whole ring
  // Of each bucket's slot, by number. Empty: slots are equal.
  std::vector<std::size_t> offsets;
};

// `bytes` has the size of each bucket's slot, by number; 0: it has none in the ring.
// `together` has the sets of buckets that are unsharded at once. Empty: any `slots` buckets may be,
// and slots are equal.
RingPlan plan_ring(const std::vector<std::size_t>& bytes, int slots, const BucketSets& together);

// A ring of `slots` equal slots.
RingPlan equal_slots(int slots, std::size_t slot_bytes);

}  // namespace fsdp
