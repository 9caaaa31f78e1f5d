#include "core/layout.h"

#include <gtest/gtest.h>

#include "core/check.h"

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
  EXPECT_EQ(layout.unsharded_bytes(), 4 * 5 * 4U);
}

TEST(UnitLayout, FrozenParametersHaveNoPlaceInTheReduction) {
  const UnitLayout layout({spec("a", 4, 1), spec("frozen", 8, 8, false), spec("b", 4, 1)}, 2,
                          DType::Float32, DType::BFloat16);
  EXPECT_EQ(layout.placements()[1].grad_offset, -1);
  EXPECT_EQ(layout.placements()[2].grad_offset, 8);  // 16 bytes of bfloat16
  EXPECT_EQ(layout.pack_plan().entries.size(), 2U);
  EXPECT_EQ(layout.unpack_plan().entries.size(), 3U);
}

TEST(UnitLayout, NeighboursAreCastInOneRun) {
  ParamSpec a = spec("a", 8, 4);
  ParamSpec b = spec("b", 8, 4);
  a.param_dtype = b.param_dtype = DType::BFloat16;
  const UnitLayout layout({a, b}, 2, DType::Float32, DType::Float32);
  EXPECT_TRUE(layout.needs_cast());
  ASSERT_EQ(layout.shard_to_gather_plan().entries.size(), 1U);
  EXPECT_EQ(layout.shard_to_gather_plan().entries[0].numel, 32);
}

TEST(UnitLayout, ALoneParameterNeedsNoUnpacking) {
  EXPECT_TRUE(
      UnitLayout({spec("w", 5, 3)}, 4, DType::Float32, DType::Float32).staging_is_unsharded());
  EXPECT_FALSE(UnitLayout({spec("w", 5, 3), spec("b", 5, 1)}, 4, DType::Float32, DType::Float32)
                   .staging_is_unsharded());
}

TEST(UnitLayout, RefusesWhatCannotBe) {
  EXPECT_THROW(UnitLayout({spec("w", 5, 3)}, 0, DType::Float32, DType::Float32), Error);
  EXPECT_THROW(UnitLayout({spec("w", 5, 3)}, 2, DType::Float64, DType::Float32), Error);
  EXPECT_THROW(UnitLayout({spec("w", -1, 3)}, 2, DType::Float32, DType::Float32), Error);
}

}  // namespace
}  // namespace fsdp
