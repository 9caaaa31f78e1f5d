#include "core/layout.h"

#include <gtest/gtest.h>

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

TEST(UnitLayout, RanksHaveTheRowsOfTorchChunk) {
  const UnitLayout layout({spec("w", 10, 3)}, 4, DType::Float32, DType::Float32);
  EXPECT_EQ(layout.first_row(0, 0), 0);
  EXPECT_EQ(layout.row_count(0, 2), 3);
  EXPECT_EQ(layout.first_row(0, 3), 9);
  EXPECT_EQ(layout.row_count(0, 3), 1);
}

TEST(UnitLayout, FewerRowsThanRanksLeavesRanksWithoutRows) {
  const UnitLayout layout({spec("w", 2, 5)}, 4, DType::Float32, DType::Float32);
  EXPECT_EQ(layout.row_count(0, 1), 1);
  EXPECT_EQ(layout.row_count(0, 2), 0);
  EXPECT_EQ(layout.row_count(0, 3), 0);
  EXPECT_EQ(layout.placements()[0].chunk_numel, 5);
}

TEST(UnitLayout, FrozenParametersHaveNoPlaceInTheReduction) {
  const UnitLayout layout({spec("a", 4, 1), spec("frozen", 8, 8, false), spec("b", 4, 1)}, 2,
                          DType::Float32, DType::BFloat16);
  EXPECT_EQ(layout.placements()[1].grad_offset, -1);
  EXPECT_EQ(layout.placements()[2].grad_offset, 8);  // 16 bytes of bfloat16
  EXPECT_EQ(layout.pack_plan(layout.whole()).entries.size(), 2U);
  EXPECT_EQ(layout.gather_plan(GatherBy::Packing, layout.whole()).unpack.entries.size(), 3U);
}

TEST(UnitLayout, NeighboursAreCastInOneRun) {
  ParamSpec a = spec("a", 8, 4);
  ParamSpec b = spec("b", 8, 4);
  a.param_dtype = b.param_dtype = DType::BFloat16;
  const UnitLayout layout({a, b}, 2, DType::Float32, DType::Float32);
  EXPECT_TRUE(layout.needs_cast());
  ASSERT_EQ(layout.shard_to_gather_plan(layout.whole()).entries.size(), 1U);
  EXPECT_EQ(layout.shard_to_gather_plan(layout.whole()).entries[0].numel, 32);
}

TEST(UnitLayout, ALoneParameterNeedsNoUnpacking) {
  for (const GatherBy by : {GatherBy::Packing, GatherBy::Size, GatherBy::Parameter}) {
    const UnitLayout layout({spec("w", 5, 3), spec("empty", 0, 3)}, 4, DType::Float32,
                            DType::Float32);
    const GatherPlan plan = layout.gather_plan(by, layout.whole());
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

  const GatherPlan packed = layout.gather_plan(GatherBy::Packing, layout.whole());
  EXPECT_TRUE(packed.direct.empty());
  EXPECT_EQ(packed.packed_bytes, layout.gather_bytes());

  const GatherPlan plan = layout.gather_plan(GatherBy::Size, layout.whole());
  ASSERT_EQ(plan.direct.size(), 1U);
  EXPECT_EQ(plan.direct[0].destination_offset, layout.placements()[0].unsharded_offset);
  EXPECT_EQ(plan.direct[0].bytes, 256U);
  EXPECT_EQ(plan.packed_offset, 256U);
  EXPECT_EQ(plan.packed_offset + plan.packed_bytes, layout.gather_bytes());
  ASSERT_EQ(plan.unpack.entries.size(), 2U);
  EXPECT_EQ(plan.unpack.entries[0].source_offset, 0U);
  EXPECT_EQ(plan.unpack.segment_bytes, plan.packed_bytes);

  const GatherPlan direct = layout.gather_plan(GatherBy::Parameter, layout.whole());
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
