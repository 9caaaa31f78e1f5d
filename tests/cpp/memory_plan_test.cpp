// The buffers of buckets, compared with sizes that are written out.
#include "core/memory/memory_plan.h"

#include <gtest/gtest.h>

#include "base/align.h"

namespace fsdp {
namespace {

ParamSpec spec(std::int64_t rows, std::int64_t row_numel, bool trainable = true) {
  ParamSpec param;
  param.name = "w";
  param.rows = rows;
  param.row_numel = row_numel;
  param.trainable = trainable;
  return param;
}

// Two parameters with 4 rows on each rank, of 16 and 32 bytes: 64 and 128 bytes on each rank.
UnitLayout two_parameters(int ranks, DType wire = DType::Float32) {
  std::vector<ParamSpec> params = {spec(4 * ranks, 4), spec(4 * ranks, 8)};
  for (ParamSpec& param : params) {
    param.param_dtype = wire;
  }
  return {params, ranks, DType::Float32, DType::Float32};
}

MessageLimits both(std::size_t bytes) { return {bytes, bytes}; }

BucketUse bucket(std::size_t slot, bool reshards = true) {
  BucketUse use;
  use.buffers.slot = slot;
  use.reshards_after_forward = reshards;
  return use;
}

TEST(MemoryPlan, StagingHasRoomForWhatATransportPacks) {
  const UnitLayout layout = two_parameters(8);
  EXPECT_EQ(buffers_of(layout, GatherBy::Packing, both(0)).staging, 8 * 192U);
  EXPECT_EQ(buffers_of(layout, GatherBy::Parameter, both(0)).staging, 0U);
  const BucketBuffers buffers = buffers_of(layout, GatherBy::Size, both(0));
  EXPECT_EQ(buffers.staging, 8 * 192U);  // both are small
  EXPECT_EQ(buffers.slot, 8 * 192U);
  EXPECT_EQ(buffers.reduce_input, 8 * 192U);
  EXPECT_EQ(buffers.reduce_output, 192U);
  EXPECT_EQ(buffers.gather_input, 0U);
  EXPECT_EQ(buffers.gather_messages, 1U);
  EXPECT_EQ(buffers.reduce_messages, 1U);
}

TEST(MemoryPlan, StagingHasRoomForWhatASmallerGroupPacks) {
  const UnitLayout layout = two_parameters(8);
  const SmallerGroup group{2, GatherBy::Packing};
  EXPECT_EQ(buffers_of(layout, GatherBy::Parameter, both(0), group).staging, 8 * 192U);
  EXPECT_EQ(buffers_of(layout, GatherBy::Parameter, both(0), group).group_shard, 4 * 192U);
}

TEST(MemoryPlan, ACastOnSeveralRanksNeedsAGatherInput) {
  EXPECT_EQ(buffers_of(two_parameters(8, DType::BFloat16), GatherBy::Packing, both(0)).gather_input,
            96U);
  // One rank casts into its slot. Without a cast it needs no slot.
  const BucketBuffers cast =
      buffers_of(two_parameters(1, DType::BFloat16), GatherBy::Packing, both(0));
  EXPECT_EQ(cast.gather_input, 0U);
  EXPECT_EQ(cast.slot, 512U);
  const BucketBuffers alone = buffers_of(two_parameters(1), GatherBy::Packing, both(0));
  EXPECT_EQ(alone.slot, 0U);
  EXPECT_EQ(alone.staging, 0U);
}

TEST(MemoryPlan, PiecesNeedTwoHalves) {
  // 512 and 1,024 bytes of 8 ranks: one message for each parameter, or for some of its rows.
  const UnitLayout layout = two_parameters(8);
  const BucketBuffers whole_parameters = buffers_of(layout, GatherBy::Packing, both(1024));
  EXPECT_EQ(whole_parameters.gather_messages, 2U);
  EXPECT_EQ(whole_parameters.staging, 0U);  // each is alone in its message
  EXPECT_EQ(whole_parameters.reduce_input, 2 * 1024U);
  const BucketBuffers rows = buffers_of(layout, GatherBy::Packing, both(256));
  EXPECT_EQ(rows.gather_messages, 2 + 4U);
  EXPECT_EQ(rows.staging, 2 * 256U);
  EXPECT_EQ(rows.reduce_input, 2 * 256U);
  EXPECT_EQ(rows.reduce_output, 192U);
}

TEST(MemoryPlan, ReductionsMayBeCutWhereGathersAreNot) {
  const BucketBuffers buffers =
      buffers_of(two_parameters(8), GatherBy::Packing, MessageLimits{0, 256});
  EXPECT_EQ(buffers.gather_messages, 1U);
  EXPECT_FALSE(buffers.gathers_in_pieces);
  EXPECT_EQ(buffers.reduce_messages, 2 + 4U);
  EXPECT_EQ(buffers.reduce_input, 2 * 256U);
}

TEST(MemoryPlan, ARowThatIsLargerThanAReductionsLimitTravelsAlone) {
  const std::vector<LayoutPart> parts = reduce_parts(two_parameters(8), MessageLimits{0, 200});
  ASSERT_EQ(parts.size(), 4 + 4U);  // rows of 128 and of 256 bytes
  EXPECT_EQ(parts.back().rows, 1);
}

TEST(MemoryPlan, GatherInputsAreMemoryOnlyIfTheyAreKept) {
  BucketUse small = bucket(512);
  small.buffers.gather_input = 96;
  BucketUse large = bucket(1024);
  large.buffers.gather_input = 600;
  const std::vector<BucketUse> uses = {small, large, bucket(256)};
  const std::size_t all = align_up(96, kRegionAlignment) + align_up(600, kRegionAlignment);
  EXPECT_EQ(plan_gathers(uses, 2, {}, /*keeps_inputs=*/true).kept_input_bytes, all);
  EXPECT_EQ(plan_gathers(uses, 2, {}, /*keeps_inputs=*/false).kept_input_bytes, 0U);
}

TEST(MemoryPlan, OneRankHasNoMessagesToCut) {
  EXPECT_EQ(gather_parts(two_parameters(1), both(16)).size(), 1U);
  EXPECT_EQ(reduce_parts(two_parameters(1), both(16)).size(), 1U);
}

TEST(MemoryPlan, FrozenPartsAreNotReduced) {
  const UnitLayout some({spec(16, 4, /*trainable=*/false), spec(16, 4)}, 4, DType::Float32,
                        DType::Float32);
  ASSERT_EQ(gather_parts(some, both(256)).size(), 2U);
  ASSERT_EQ(reduce_parts(some, both(256)).size(), 1U);
  EXPECT_EQ(some.reduce_plan(reduce_parts(some, both(256)).front()).pack.segment_numel, 16);
  const UnitLayout none({spec(16, 4, /*trainable=*/false)}, 4, DType::Float32, DType::Float32);
  ASSERT_EQ(reduce_parts(none, both(64)).size(), 1U);  // without parameters
  EXPECT_EQ(buffers_of(none, GatherBy::Packing, both(64)).reduce_input, 0U);
}

TEST(MemoryPlan, TheRingHasSlotsOfTheLargestBucketThatReshards) {
  const std::vector<BucketUse> buckets = {bucket(4096, /*reshards=*/false), bucket(256),
                                          bucket(1024), bucket(0)};
  EXPECT_EQ(plan_gathers(buckets, 5).ring.slots, 2);  // a third would stay empty
  EXPECT_EQ(plan_gathers(buckets, 1).ring.slots, 1);
  EXPECT_EQ(plan_gathers(buckets, 5).ring.slot_bytes, 1024U);
  EXPECT_EQ(plan_gathers({bucket(512, false)}, 2).ring.slots, 0);
  const UnitLayout root = two_parameters(8);
  const UnitLayout empty({}, 8, DType::Float32, DType::Float32);
  EXPECT_EQ(ring_slots(/*nesting=*/2, /*prefetch_depth=*/3, /*root_reshards=*/false, root), 5);
  EXPECT_EQ(ring_slots(/*nesting=*/2, /*prefetch_depth=*/3, /*root_reshards=*/true, root), 6);
  EXPECT_EQ(ring_slots(/*nesting=*/2, /*prefetch_depth=*/3, /*root_reshards=*/true, empty), 5);
}

TEST(MemoryPlan, SharedBuffersFitTheLargestBucket) {
  const UnitLayout large = two_parameters(8);
  const UnitLayout small({spec(3, 5)}, 8, DType::Float32, DType::Float32);
  const std::vector<BucketUse> uses = {{buffers_of(small, GatherBy::Packing, both(0)), true},
                                       {buffers_of(large, GatherBy::Packing, both(0)), false}};
  EXPECT_EQ(plan_gathers(uses, 2).staging_bytes, 8 * 192U);
  EXPECT_FALSE(plan_gathers(uses, 2).any_in_pieces);
  const ReduceMemory reductions = plan_reductions(uses, /*may_pack_ahead=*/false);
  EXPECT_EQ(reductions.input_bytes, 8 * 192U);
  EXPECT_EQ(reductions.output_bytes, 192U);
}

TEST(MemoryPlan, HalvesAreAlignedIfABucketIsInPieces) {
  const UnitLayout odd({spec(8 * 13, 5)}, 8, DType::Float32, DType::Float32);
  const BucketUse whole{buffers_of(odd, GatherBy::Packing, both(0)), true};
  const BucketUse cut{buffers_of(two_parameters(8), GatherBy::Packing, both(256)), true};
  ASSERT_GT(cut.buffers.reduce_messages, 1U);
  EXPECT_EQ(plan_reductions({whole}, false).input_bytes, 8 * 272U);
  EXPECT_FALSE(plan_reductions({whole}, false).any_in_pieces);
  EXPECT_EQ(plan_reductions({whole, cut}, false).input_bytes, 5 * 512U);
  EXPECT_TRUE(plan_reductions({whole, cut}, false).any_in_pieces);
}

TEST(MemoryPlan, PackingAheadNeedsTwoInputsOfTheLargestMessage) {
  const UnitLayout odd({spec(8 * 13, 5)}, 8, DType::Float32, DType::Float32);
  const BucketUse whole{buffers_of(odd, GatherBy::Packing, both(0)), true};
  const BucketUse cut{buffers_of(two_parameters(8), GatherBy::Packing, both(256)), true};
  const ReduceMemory several = plan_reductions({whole, whole, cut}, /*may_pack_ahead=*/true);
  EXPECT_TRUE(several.packs_ahead);
  EXPECT_EQ(several.input_bytes, 2 * 2304U);  // 8 * 272 bytes, and room for the alignment
  EXPECT_EQ(several.output_bytes, plan_reductions({whole, whole, cut}, false).output_bytes);
  EXPECT_EQ(plan_reductions({cut}, true).input_bytes, 2 * 256U);
  // A second input for a single message would stay empty.
  EXPECT_FALSE(plan_reductions({whole, bucket(256)}, true).packs_ahead);
  EXPECT_EQ(plan_reductions({whole, bucket(256)}, true).input_bytes, 8 * 272U);
}

TEST(MemoryPlan, TheReduceOutputIsThatOfAMessageOrOfTwo) {
  const BucketUse whole{buffers_of(two_parameters(8), GatherBy::Packing, both(0)), true};
  BucketUse cut{buffers_of(two_parameters(8), GatherBy::Packing, both(256)), true};
  EXPECT_EQ(cut.buffers.reduce_output, 192U);
  EXPECT_EQ(cut.buffers.message_output, 32U);
  const auto output = [](const std::vector<BucketUse>& uses, bool has_replicas) {
    return plan_reductions(uses, /*may_pack_ahead=*/true, has_replicas).output_bytes;
  };
  EXPECT_EQ(output({whole, whole}, false), 192U);
  EXPECT_EQ(output({whole, whole}, true), 2 * 256U);
  EXPECT_EQ(output({cut, cut}, false), 2 * 256U);
  EXPECT_EQ(output({cut, cut}, true), 2 * 256U);
  const UnitLayout large({spec(8 * 100, 8)}, 8, DType::Float32, DType::Float32);
  BucketUse pieces{buffers_of(large, GatherBy::Packing, both(2560)), true};
  ASSERT_EQ(pieces.buffers.reduce_messages, 10U);
  EXPECT_EQ(output({pieces, cut}, false), 2 * 512U);
  cut.reads_whole_output = true;
  EXPECT_EQ(output({pieces, cut}, false), 2 * 512U);
  pieces.reads_whole_output = true;
  EXPECT_EQ(output({pieces, cut}, false), 7 * 512U);  // 3200 bytes
}

TEST(MemoryPlan, ReductionsWriteTheGradientIfNothingIsCastOrScaled) {
  EXPECT_TRUE(reduces_in_place(two_parameters(2), 1.0));
  EXPECT_FALSE(reduces_in_place(two_parameters(2), 0.5));
  EXPECT_FALSE(reduces_in_place(UnitLayout({spec(4, 4)}, 2, DType::Float32, DType::BFloat16), 1.0));
}

TEST(MemoryPlan, GradientsTakeAsMuchAsTheLargestBucketOrTwoTypicalOnes) {
  const auto most = [](const std::vector<std::size_t>& of_buckets) {
    std::vector<BucketUse> uses;
    for (const std::size_t bytes : of_buckets) {
      uses.push_back(bucket(256));
      uses.back().buffers.gradients = bytes;
    }
    return plan_reductions(uses, /*may_pack_ahead=*/false).most_gradients;
  };
  EXPECT_EQ(most({}), 0U);
  EXPECT_EQ(most({7}), 14U);
  EXPECT_EQ(most({10, 10, 15, 10}), 20U);
  EXPECT_EQ(most({10, 10, 10, 35}), 35U);
  EXPECT_EQ(most({10, 10, 35, 35}), 70U);      // large ones are typical
  EXPECT_EQ(most({10, 0, 35, 0, 0, 0}), 70U);  // frozen buckets do not count
  EXPECT_EQ(most({35, 1, 10, 10, 10, 10, 10, 35}), 35U);
}

TEST(MemoryPlan, GradientsAreAsLargeAsAutogradMakesThem) {
  ParamSpec half = spec(4, 6);
  half.param_dtype = DType::BFloat16;
  ParamSpec own = half;
  own.unsharded_grad_dtype = DType::Float32;
  ParamSpec frozen = half;
  frozen.trainable = false;
  const UnitLayout layout({half, own, frozen}, 3, DType::Float32, DType::Float32);
  EXPECT_EQ(buffers_of(layout, GatherBy::Packing, both(0)).gradients, 24U * 2 + 24U * 4);
}

}  // namespace
}  // namespace fsdp
