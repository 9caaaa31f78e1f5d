#include "core/memory/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "base/check.h"

namespace fsdp {
namespace {

ParamSpec spec(const char* name, std::int64_t rows, std::int64_t row_numel, bool trainable = true) {
  ParamSpec param;
  param.name = name;
  param.rows = rows;
  param.row_numel = row_numel;
  param.trainable = trainable;
  return param;
}

std::int64_t pick(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// A layout of a few parameters of any size. Without `casts` the wire has the shards' dtypes.
UnitLayout random_layout(std::mt19937& random, bool casts) {
  const auto dtype = [&random] {
    constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};
    return kFloats[pick(random, 0, 3)];
  };
  const DType grad_dtype = dtype();
  std::vector<ParamSpec> params;
  for (std::int64_t left = pick(random, 0, 5); left > 0; --left) {
    ParamSpec param = spec("w", pick(random, 0, 70), pick(random, 0, 25), pick(random, 0, 1) == 1);
    param.shard_dtype = param.trainable ? grad_dtype : dtype();
    param.param_dtype = casts ? dtype() : param.shard_dtype;
    param.gathered = pick(random, 0, 4) > 0;
    if (param.trainable && pick(random, 0, 2) == 0) {  // the layout's is the smallest
      param.grad_dtype = pick(random, 0, 1) == 1 ? DType::Float64 : grad_dtype;
    }
    if (!param.trainable && pick(random, 0, 1) == 1) {
      param.shard_dtype = param.param_dtype = DType::Bytes;
    }
    params.push_back(param);
  }
  return {params, static_cast<int>(pick(random, 1, 64)), grad_dtype, dtype()};
}

// Marks [start, start + count) as used. Returns false if some of it is used already, or outside.
bool claim(std::vector<bool>& places, std::size_t start, std::size_t count) {
  if (start + count > places.size()) {
    return false;
  }
  const auto begin = places.begin() + static_cast<std::ptrdiff_t>(start);
  const auto end = begin + static_cast<std::ptrdiff_t>(count);
  const bool is_free = std::find(begin, end, true) == end;
  std::fill(begin, end, true);
  return is_free;
}

TEST(UnitLayout, GroupsOfEverySizeShareTheUnshardedBufferAsItIs) {
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const UnitLayout layout = random_layout(random, /*casts=*/true);
    for (int ranks = 2; ranks < layout.world_size(); ++ranks) {
      if (layout.world_size() % ranks != 0) {
        continue;
      }
      const UnitLayout group = layout.regrouped(ranks);
      ASSERT_EQ(group.unsharded_bytes(), layout.unsharded_bytes());
      EXPECT_FALSE(group.needs_cast());
      std::vector<bool> kept(layout.unsharded_bytes(), false);
      for (int rank = 0; rank < ranks; ++rank) {
        std::vector<bool> input(group.gather_bytes(), false);
        for (const UnpackEntry& entry : group.keep_plan(rank).entries) {
          ASSERT_TRUE(claim(kept, entry.source_offset, entry.chunk_bytes));
          ASSERT_TRUE(claim(input, entry.destination_offset, entry.chunk_bytes));
        }
      }
      for (std::size_t p = 0; p < layout.params().size(); ++p) {
        const ParamPlacement& place = layout.placements()[p];
        ASSERT_EQ(group.placements()[p].unsharded_offset, place.unsharded_offset);
        if (!layout.params()[p].gathered) {
          continue;
        }
        const std::size_t bytes =
            static_cast<std::size_t>(place.numel) * itemsize(layout.params()[p].param_dtype);
        const auto begin = kept.begin() + static_cast<std::ptrdiff_t>(place.unsharded_offset);
        EXPECT_EQ(std::count(begin, begin + static_cast<std::ptrdiff_t>(bytes), false), 0)
            << "some of parameter " << p << " is kept by nobody";
      }
    }
  }
}

TEST(UnitLayout, ChunksAndRegionsDoNotOverlapAndStartAligned) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const UnitLayout layout = random_layout(random, /*casts=*/true);
    const auto ranks = static_cast<std::size_t>(layout.world_size());
    std::vector<bool> shard(layout.shard_bytes());
    std::vector<bool> gather(layout.gather_bytes());
    std::vector<bool> unsharded(layout.unsharded_bytes());
    std::vector<bool> gradients(static_cast<std::size_t>(layout.grad_numel()));
    std::vector<bool> flat_gradient(layout.gradient_bytes());
    for (std::size_t p = 0; p < layout.params().size(); ++p) {
      const ParamSpec& param = layout.params()[p];
      const ParamPlacement& place = layout.placements()[p];
      const auto numel = static_cast<std::size_t>(place.chunk_numel);
      const std::size_t gathered = param.gathered ? numel : 0;
      const std::size_t chunk = gathered * itemsize(param.param_dtype);
      EXPECT_EQ(place.shard_offset % kAlignment, 0U);
      EXPECT_EQ(place.gather_offset % kAlignment, 0U);
      EXPECT_EQ(place.unsharded_offset % kRegionAlignment, 0U);
      EXPECT_TRUE(claim(shard, place.shard_offset, gathered * itemsize(param.shard_dtype)));
      EXPECT_TRUE(claim(gather, place.gather_offset, chunk));
      EXPECT_TRUE(claim(unsharded, place.unsharded_offset, ranks * chunk));
      if (!param.trainable) {
        EXPECT_EQ(place.grad_offset, -1);
        continue;
      }
      const auto offset = static_cast<std::size_t>(place.grad_offset);
      EXPECT_EQ(offset * itemsize(layout.grad_dtype()) % kAlignment, 0U);
      EXPECT_EQ(offset * itemsize(layout.reduce_dtype()) % kAlignment, 0U);
      EXPECT_TRUE(claim(gradients, offset, numel));
      const DType kept = param.grad_dtype.value_or(layout.grad_dtype());
      EXPECT_EQ(place.flat_gradient_offset % kAlignment, 0U);
      EXPECT_TRUE(claim(flat_gradient, place.flat_gradient_offset, numel * itemsize(kept)));
    }
    const std::size_t padding = ranks == 1 ? kRegionAlignment : kAlignment;
    const auto used = static_cast<std::size_t>(std::count(shard.begin(), shard.end(), true));
    EXPECT_LT(layout.shard_bytes(),
              used + padding * std::max<std::size_t>(1, layout.params().size()));
  }
}

// Copies each rank's rows by the offsets alone.
TEST(UnitLayout, GatheringTheChunksOfAllRanksGivesEachParameterBack) {
  std::mt19937 random(2);
  for (int i = 0; i < 150; ++i) {
    const UnitLayout layout = random_layout(random, /*casts=*/false);
    const auto bytes_of = [&layout](std::size_t p, std::int64_t rows) -> std::ptrdiff_t {
      if (!layout.params()[p].gathered) {
        return 0;
      }
      return static_cast<std::ptrdiff_t>(rows * layout.params()[p].row_numel) *
             static_cast<std::ptrdiff_t>(itemsize(layout.params()[p].param_dtype));
    };
    std::vector<std::vector<std::uint8_t>> originals;
    std::vector<std::uint8_t> unsharded(layout.unsharded_bytes(), 0xff);
    for (std::size_t p = 0; p < layout.params().size(); ++p) {
      std::vector<std::uint8_t> original(
          static_cast<std::size_t>(bytes_of(p, layout.params()[p].rows)));
      std::generate(original.begin(), original.end(),
                    [&random] { return static_cast<std::uint8_t>(pick(random, 0, 255)); });
      originals.push_back(std::move(original));
    }
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      std::vector<std::uint8_t> input(layout.gather_bytes());
      for (std::size_t p = 0; p < originals.size(); ++p) {
        const auto first = originals[p].begin() + bytes_of(p, layout.rows(p, rank).first);
        std::copy(
            first, first + bytes_of(p, layout.rows(p, rank).count),
            input.begin() + static_cast<std::ptrdiff_t>(layout.placements()[p].gather_offset));
      }
      for (std::size_t p = 0; p < originals.size(); ++p) {
        const ParamPlacement& place = layout.placements()[p];
        const std::ptrdiff_t chunk = bytes_of(p, place.chunk_rows);
        const auto from = input.begin() + static_cast<std::ptrdiff_t>(place.gather_offset);
        std::copy(
            from, from + chunk,
            unsharded.begin() + static_cast<std::ptrdiff_t>(place.unsharded_offset) + rank * chunk);
      }
    }
    for (std::size_t p = 0; p < originals.size(); ++p) {
      const auto region =
          unsharded.begin() + static_cast<std::ptrdiff_t>(layout.placements()[p].unsharded_offset);
      EXPECT_TRUE(std::equal(originals[p].begin(), originals[p].end(), region));
    }
  }
}

TEST(UnitLayout, ARowOfAMessageIsThatOfTheLargerCollective) {
  ParamSpec trained = spec("trained", 10, 3);
  ParamSpec frozen = spec("frozen", 10, 3, /*trainable=*/false);
  trained.param_dtype = frozen.param_dtype = DType::BFloat16;
  const UnitLayout layout({trained, frozen}, 4, DType::Float32, DType::Float32);
  EXPECT_EQ(layout.row_bytes(0), 4 * 3 * 4U);  // of the reduction
  EXPECT_EQ(layout.row_bytes(1), 4 * 3 * 2U);  // of the gather
}

TEST(UnitLayout, RanksHaveTheRowsOfTorchChunk) {
  const UnitLayout layout({spec("w", 10, 3)}, 4, DType::Float32, DType::Float32);
  EXPECT_EQ(layout.rows(0, 0).first, 0);
  EXPECT_EQ(layout.rows(0, 2).count, 3);
  EXPECT_EQ(layout.rows(0, 3).first, 9);
  EXPECT_EQ(layout.rows(0, 3).count, 1);
}

TEST(UnitLayout, FewerRowsThanRanksLeavesRanksWithoutRows) {
  const UnitLayout layout({spec("w", 2, 5)}, 4, DType::Float32, DType::Float32);
  EXPECT_EQ(layout.rows(0, 1).count, 1);
  EXPECT_EQ(layout.rows(0, 2).count, 0);
  EXPECT_EQ(layout.rows(0, 3).count, 0);
  EXPECT_EQ(layout.placements()[0].chunk_numel, 5);
}

TEST(UnitLayout, ChunksOfSeveralRunsComeLastAndAreAlwaysPacked) {
  ParamSpec runs = spec("runs", 2, 12);
  runs.runs = 3;
  const std::vector<ParamSpec> params = {spec("a", 4, 4), runs, spec("b", 4, 4)};
  EXPECT_EQ(layout_order(params, 2, /*direct_bytes=*/1), (std::vector<std::size_t>{0, 2, 1}));
  const UnitLayout layout({params[0], params[2], params[1]}, 2, DType::Float32, DType::Float32,
                          /*direct_bytes=*/1);
  for (const GatherBy by : {GatherBy::Parameter, GatherBy::Size}) {
    const GatherPlan plan = layout.gather_plan(by, whole(layout));
    EXPECT_EQ(plan.direct.size(), 2U);
    ASSERT_EQ(plan.unpack.entries.size(), 1U);
    EXPECT_EQ(plan.unpack.entries[0].runs, 3);
    EXPECT_EQ(plan.packed_bytes, 12 * sizeof(float));
  }
  EXPECT_EQ(layout.reduce_plan(whole(layout)).pack.entries[2].runs, 3);
  // Even a bucket that begins with it, and a message that is smaller than it.
  const UnitLayout joined = UnitLayout::joined({&layout, &layout});
  const LayoutPart part{2, 6};
  EXPECT_TRUE(joined.gather_plan(GatherBy::Parameter, part).direct.empty());
  EXPECT_THROW(layout.parts(Wire::Gather, 2 * 12 * sizeof(float) - 1), Error);
  EXPECT_EQ(layout.parts(Wire::Gather, 2 * 12 * sizeof(float)).size(), 3U);
  const std::vector<LayoutPart> reductions = layout.parts(Wire::Reduce, 2 * 4 * sizeof(float));
  ASSERT_EQ(reductions.size(), 5U);  // two rows of each of the others
  EXPECT_FALSE(reductions[4].is_of_rows());
  EXPECT_EQ(layout.reduce_plan(reductions[4]).pack.entries[0].runs, 3);
}

TEST(UnitLayout, FrozenParametersHaveNoPlaceInTheReduction) {
  const UnitLayout layout({spec("a", 4, 1), spec("frozen", 8, 8, false), spec("b", 4, 1)}, 2,
                          DType::Float32, DType::BFloat16);
  EXPECT_EQ(layout.placements()[1].grad_offset, -1);
  EXPECT_EQ(layout.placements()[2].grad_offset, 8);  // 16 bytes of bfloat16
  EXPECT_EQ(layout.reduce_plan(whole(layout)).pack.entries.size(), 2U);
  EXPECT_EQ(layout.gather_plan(GatherBy::Packing, whole(layout)).unpack.entries.size(), 3U);
}

TEST(UnitLayout, WhatIsNotGatheredHasAPlaceInTheReductionOnly) {
  ParamSpec reduced = spec("reduced", 5, 3);
  reduced.gathered = false;
  reduced.param_dtype = DType::BFloat16;
  const UnitLayout layout({reduced, spec("a", 4, 3), reduced}, 2, DType::Float32, DType::Float32,
                          /*direct_bytes=*/1);
  EXPECT_FALSE(layout.needs_cast());
  EXPECT_EQ(layout.shard_bytes(), 32U);  // 2 * 3 elements, aligned
  EXPECT_EQ(layout.gather_bytes(), 32U);
  EXPECT_EQ(layout.unsharded_bytes(), kRegionAlignment);
  EXPECT_EQ(layout.shard_to_gather_plan(whole(layout)).entries.size(), 1U);
  for (const GatherBy by : {GatherBy::Packing, GatherBy::Size, GatherBy::Parameter}) {
    const GatherPlan plan = layout.gather_plan(by, whole(layout));
    ASSERT_EQ(plan.direct.size(), 1U);
    EXPECT_EQ(plan.direct[0].source_offset, 0U);
    EXPECT_EQ(plan.direct[0].destination_offset, 0U);
    EXPECT_EQ(plan.packed_bytes, 0U);
  }
  EXPECT_EQ(layout.reduce_plan(whole(layout)).pack.entries.size(), 3U);
  EXPECT_EQ(layout.row_bytes(0), 2 * 3 * sizeof(float));
  // Messages of the gather do not count it, however small they are.
  EXPECT_EQ(layout.parts(Wire::Gather, 2 * 6 * sizeof(float)).size(), 1U);
  EXPECT_EQ(layout.parts(Wire::Reduce, 2 * 9 * sizeof(float)).size(), 3U);
}

TEST(UnitLayout, NeighboursAreCastInOneRun) {
  ParamSpec a = spec("a", 8, 4);
  ParamSpec b = spec("b", 8, 4);
  a.param_dtype = b.param_dtype = DType::BFloat16;
  const UnitLayout layout({a, b}, 2, DType::Float32, DType::Float32);
  EXPECT_TRUE(layout.needs_cast());
  ASSERT_EQ(layout.shard_to_gather_plan(whole(layout)).entries.size(), 1U);
  EXPECT_EQ(layout.shard_to_gather_plan(whole(layout)).entries[0].numel, 32);
}

TEST(UnitLayout, ALoneParameterNeedsNoUnpacking) {
  for (const GatherBy by : {GatherBy::Packing, GatherBy::Size, GatherBy::Parameter}) {
    const UnitLayout layout({spec("w", 5, 3), spec("empty", 0, 3)}, 4, DType::Float32,
                            DType::Float32);
    const GatherPlan plan = layout.gather_plan(by, whole(layout));
    ASSERT_EQ(plan.direct.size(), 1U);
    EXPECT_EQ(plan.direct[0].bytes, 2 * 3 * 4U);
    EXPECT_EQ(plan.packed_bytes, 0U);
  }
}

TEST(UnitLayout, OnOneRankTheFlatShardIsTheUnshardedBuffer) {
  const UnitLayout layout({spec("a", 5, 3), spec("large", 8, 16), spec("b", 4, 3)}, 1,
                          DType::Float32, DType::Float32);
  for (const ParamPlacement& place : layout.placements()) {
    EXPECT_EQ(place.shard_offset, place.unsharded_offset);
    EXPECT_EQ(place.shard_offset, static_cast<std::size_t>(place.grad_offset) * sizeof(float));
    EXPECT_EQ(place.unsharded_offset % kRegionAlignment, 0U);
  }
  EXPECT_EQ(layout.shard_bytes(), layout.unsharded_bytes());
}

TEST(UnitLayout, LargeParametersAreGatheredToTheirPlacesWhereATransportCanGroup) {
  const UnitLayout layout({spec("large", 8, 16), spec("a", 4, 3), spec("b", 4, 3)}, 2,
                          DType::Float32, DType::Float32, /*direct_bytes=*/512);

  const GatherPlan packed = layout.gather_plan(GatherBy::Packing, whole(layout));
  EXPECT_TRUE(packed.direct.empty());
  EXPECT_EQ(packed.packed_bytes, layout.gather_bytes());

  const GatherPlan plan = layout.gather_plan(GatherBy::Size, whole(layout));
  ASSERT_EQ(plan.direct.size(), 1U);
  EXPECT_EQ(plan.direct[0].destination_offset, layout.placements()[0].unsharded_offset);
  EXPECT_EQ(plan.direct[0].bytes, 256U);
  EXPECT_EQ(plan.packed_offset, 256U);
  EXPECT_EQ(plan.packed_offset + plan.packed_bytes, layout.gather_bytes());
  ASSERT_EQ(plan.unpack.entries.size(), 2U);
  EXPECT_EQ(plan.unpack.entries[0].source_offset, 0U);
  EXPECT_EQ(plan.unpack.segment_bytes, plan.packed_bytes);

  const GatherPlan direct = layout.gather_plan(GatherBy::Parameter, whole(layout));
  ASSERT_EQ(direct.direct.size(), 3U);
  EXPECT_EQ(direct.direct[2].source_offset, layout.placements()[2].gather_offset);
  EXPECT_EQ(direct.direct[2].destination_offset, layout.placements()[2].unsharded_offset);
  EXPECT_EQ(direct.packed_bytes, 0U);
}

TEST(LayoutOrder, PutsLargeParametersFirstAndKeepsTheOrderOtherwise) {
  const std::vector<ParamSpec> params = {spec("a", 4, 3), spec("large", 8, 16), spec("b", 4, 3),
                                         spec("padded", 15, 8)};
  using Order = std::vector<std::size_t>;
  EXPECT_EQ(layout_order(params, 2, /*direct_bytes=*/512), (Order{1, 3, 0, 2}));
  EXPECT_EQ(layout_order(params, 1, /*direct_bytes=*/512), (Order{1, 0, 2, 3}));
  EXPECT_EQ(layout_order(params, 2, /*direct_bytes=*/0), (Order{0, 1, 2, 3}));
  EXPECT_EQ(layout_order({}, 2), Order{});
}

TEST(UnitLayout, RefusesSizesAndDtypesThatCannotBe) {
  EXPECT_THROW(UnitLayout({spec("w", 5, 3)}, 0, DType::Float32, DType::Float32), Error);
  EXPECT_THROW(UnitLayout({spec("w", 5, 3)}, 2, DType::Float64, DType::Float32), Error);
  EXPECT_THROW(UnitLayout({spec("w", -1, 3)}, 2, DType::Float32, DType::Float32), Error);
}

}  // namespace
}  // namespace fsdp
