// The places of buckets in the ring, and the buckets that are unsharded at once.
#include "core/memory/ring_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/units/unsharded_together.h"

namespace fsdp {
namespace {

constexpr std::size_t kLarge = 2560;
constexpr std::size_t kSmall = 1024;

BucketSets together(const Partition& partition, const std::vector<int>& parents,
                    const std::vector<char>& has_slot, std::size_t depth) {
  std::vector<BucketUse> uses(has_slot.size());
  for (std::size_t bucket = 0; bucket < uses.size(); ++bucket) {
    uses[bucket].buffers.slot = has_slot[bucket] != 0 ? 1 : 0;
  }
  return unsharded_together(partition, parents, uses, depth);
}

// A root, whose slot is not in the ring, and units inside that are buckets of their own.
BucketSets chain(std::size_t units, std::size_t depth) {
  std::vector<int> parents = {-1};
  parents.resize(units + 1, 0);
  Partition partition;
  for (std::size_t unit = 0; unit <= units; ++unit) {
    partition.push_back({static_cast<int>(unit)});
  }
  std::vector<char> has_slot(units + 1, 1);
  has_slot[0] = 0;
  return together(partition, parents, has_slot, depth);
}

// An embedding, layers and a head, behind a root without a slot.
std::vector<std::size_t> sizes(std::size_t layers) {
  std::vector<std::size_t> bytes(layers + 3, kSmall);
  bytes[0] = 0;
  bytes[1] = bytes.back() = kLarge;
  return bytes;
}

void expect_no_overlap(const std::vector<std::size_t>& bytes, const BucketSets& together,
                       const RingPlan& plan) {
  ASSERT_EQ(plan.offsets.size(), bytes.size());
  for (const std::vector<int>& set : together) {
    for (const int a : set) {
      const auto i = static_cast<std::size_t>(a);
      EXPECT_LE(plan.offsets[i] + bytes[i], plan.bytes);
      for (const int b : set) {
        const auto j = static_cast<std::size_t>(b);
        EXPECT_TRUE(a == b || plan.offsets[i] + bytes[i] <= plan.offsets[j] ||
                    plan.offsets[j] + bytes[j] <= plan.offsets[i])
            << a << " and " << b;
      }
    }
  }
}

TEST(UnshardedTogether, NeighboursAreInBothPasses) {
  EXPECT_EQ(chain(3, 0), (BucketSets{{1}, {2}, {3}}));
  EXPECT_EQ(chain(3, 1), (BucketSets{{1}, {1, 2}, {2, 3}, {3}}));
  EXPECT_EQ(chain(4, 2), (BucketSets{{1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4}, {4}, {1}}));
}

// Units 1 and 4 are inside the root, 2 and 3 are inside 1.
TEST(UnshardedTogether, AnEnclosingBucketStaysWhileInnerOnesRun) {
  const std::vector<int> parents = {-1, 0, 1, 1, 0};
  const Partition alone = {{0}, {1}, {2}, {3}, {4}};
  EXPECT_EQ(together(alone, parents, {0, 1, 1, 1, 1}, 0), (BucketSets{{1}, {1, 2}, {1, 3}, {4}}));
  // The slot of the root is in the ring, and that of unit 3 is not.
  EXPECT_EQ(together(alone, parents, {1, 1, 1, 0, 1}, 0),
            (BucketSets{{0}, {0, 1}, {0, 1, 2}, {0, 4}}));
  // Backward leaves unit 4 before it enters unit 1, and prefetches 3 behind 1.
  const BucketSets ahead = together(alone, parents, {0, 1, 1, 1, 1}, 1);
  EXPECT_EQ(ahead, (BucketSets{{1}, {1, 2}, {1, 2, 3}, {1, 3, 4}, {4}, {1, 4}, {1, 3}}));
}

TEST(UnshardedTogether, ABucketOfSeveralUnitsStaysUntilTheLastIsLeft) {
  const std::vector<int> parents = {-1, 0, 0, 0};
  EXPECT_EQ(together({{0}, {1, 2}, {3}}, parents, {0, 1, 1}, 0), (BucketSets{{1}, {2}}));
  // Other units run between its units.
  EXPECT_EQ(together({{0}, {1, 3}, {2}}, parents, {0, 1, 1}, 0), (BucketSets{{1}, {1, 2}}));
}

TEST(RingPlan, TwoNeighboursFitWhateverTheNumberOfLayers) {
  for (const std::size_t layers : {1, 2, 3, 4, 31, 32}) {
    const BucketSets together = chain(layers + 2, 1);
    const RingPlan plan = plan_ring(sizes(layers), 2, together);
    EXPECT_EQ(plan.bytes, kLarge + kSmall) << layers;
    EXPECT_EQ(plan.slots, 2);
    EXPECT_EQ(plan.slot_bytes, kLarge);
    expect_no_overlap(sizes(layers), together, plan);
  }
}

TEST(RingPlan, DeeperPrefetchNeedsNoMoreThanItsNeighbours) {
  for (const std::size_t depth : {2, 3, 5}) {
    for (const std::size_t layers : {12, 13, 14, 15, 80}) {
      const BucketSets together = chain(layers + 2, depth);
      const RingPlan plan = plan_ring(sizes(layers), static_cast<int>(depth) + 1, together);
      EXPECT_EQ(plan.bytes, kLarge + depth * kSmall) << depth << " ahead of " << layers;
      expect_no_overlap(sizes(layers), together, plan);
    }
  }
}

TEST(RingPlan, AnyOrderOfSizesFits) {
  std::vector<std::size_t> bytes = {0};
  for (std::size_t i = 0; i < 60; ++i) {
    bytes.push_back((1 + i * i * 7 % 11) * 100);  // not multiples of the alignment
  }
  for (const std::size_t depth : {0, 1, 2, 4}) {
    const BucketSets together = chain(60, depth);
    const RingPlan plan = plan_ring(bytes, static_cast<int>(depth) + 1, together);
    if (!plan.offsets.empty()) {
      expect_no_overlap(bytes, together, plan);
    }
    EXPECT_LE(plan.bytes, equal_slots(static_cast<int>(depth) + 1, 1100).bytes);
  }
}

TEST(RingPlan, EqualBucketsHaveEqualSlots) {
  const std::vector<std::size_t> bytes(10, 300);
  const RingPlan plan = plan_ring(bytes, 3, chain(9, 2));
  EXPECT_TRUE(plan.offsets.empty());
  EXPECT_EQ(plan.bytes, 3 * 512U);
  EXPECT_EQ(plan_ring(bytes, 3, {}).bytes, 3 * 512U);
  EXPECT_EQ(plan_ring({0, 0}, 3, {}).bytes, 0U);
}

TEST(RingPlan, WithoutAKnownScheduleSlotsAreEqual) {
  const RingPlan plan = plan_ring(sizes(5), 2, {});
  EXPECT_TRUE(plan.offsets.empty());
  EXPECT_EQ(plan.bytes, 2 * kLarge);
}

}  // namespace
}  // namespace fsdp
