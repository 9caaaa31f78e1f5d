// Buckets that are sent in pieces: Note [pieces] in core/lanes.h.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

class PiecesOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, PiecesOnRanks, ::testing::Values(1, 2, 3));

TEST_P(PiecesOnRanks, TrainAsWholeBucketsDo) {
  const int world_size = GetParam();
  for (const GatherBy by : kAllWaysToGather) {
    for (const int message_rows : {1, 2, 3, 4, 5, 9, 100}) {
      on_bucketed_ranks(
          world_size, [&](Rank& rank, int r) { expect_steps_train(rank, r, world_size, {}); }, by,
          message_rows);
    }
  }
}

TEST(Pieces, DoNotDependOnHowLongAStreamTakes) {
  for (const GatherBy by : {GatherBy::Packing, GatherBy::Parameter}) {
    for (const char* late : {"gather", "reduce"}) {
      for (const int which : {0, 1, 2}) {
        on_bucketed_ranks(
            2,
            [&](Rank& rank, int r) {
              rank.forward(rank.in_order());
              rank.pipeline->reset();
              Lane& lane = lane_named(rank.lanes, late);
              expect_steps_train(
                  rank, r, 2, {[&]() -> Stream& {
                    return which == 0 ? lane.before() : which == 1 ? lane.stream() : lane.after();
                  }});
            },
            by, /*message_rows=*/2);
      }
    }
  }
}

TEST(Pieces, AreOneMessageEachAndSmallerBuffers) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
        // A chunk of four rows is one message.
        EXPECT_EQ(sent.forward, (std::vector<int>{0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5}));
        EXPECT_EQ(sent.reduced.size(), 14U);
        const std::size_t message = 4 * 2 * kColumns * sizeof(float);
        EXPECT_EQ(rank.pipeline->unit(1).bucket->gather.all_ranks().pieces.at(0).bytes, message);
        EXPECT_EQ(rank.pipeline->gatherer().staging_bytes(), 0U);  // each message is one parameter
        EXPECT_EQ(rank.pipeline->reducer().buffer_bytes(), 2U * 256);
      },
      GatherBy::Packing, /*message_rows=*/4);
}

TEST(Pieces, AccumulateAndDifferAsWholeBucketsDo) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int r) {
        const std::vector<int> order = rank.in_order();
        const auto train = [&] {
          rank.backward(order, rank.forward(order), static_cast<float>(r));
        };
        set_requires_gradient_sync(*rank.pipeline, 1, false);
        set_requires_gradient_sync(*rank.pipeline, 3, false);
        set_requires_gradient_sync(*rank.pipeline, 4, false);
        train();
        train();
        EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
        rank.unit(2).expect_gradient(0, 1.0F);
        set_requires_gradient_sync(*rank.pipeline, 1, true);
        set_requires_gradient_sync(*rank.pipeline, 2, false);
        train();
        rank.unit(1).expect_gradient(1, 1.5F);
        rank.unit(2).expect_gradient(1, 1.0F);
        for (int i = 1; i <= 6; ++i) {
          set_requires_gradient_sync(*rank.pipeline, i, true);
        }
        train();
        for (int i = 1; i <= 6; ++i) {
          rank.unit(i).expect_gradient(0, 2.0F);
          rank.unit(i).expect_gradient(1, 2.0F);
        }
      },
      GatherBy::Packing, /*message_rows=*/3);
}

TEST(Pieces, AUnitDoesNotWaitForLaterPieces) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.step(1.0F);
        const Bucket& bucket = *rank.pipeline->unit(1).bucket;
        ASSERT_EQ(bucket.gather.all_ranks().pieces.size(), 4U);
        EXPECT_EQ(bucket.gather.all_ranks().last_pieces.at(rank.pipeline->unit(1).position), 1U);
        EXPECT_EQ(bucket.gather.all_ranks().last_pieces.at(rank.pipeline->unit(2).position), 3U);
        rank.pipeline->unshard(1);
        Event& last = *bucket.gather.all_ranks().pieces[3].gathered;
        rank.pipeline->wait_for_unshard(1);
        rank.unit(1).expect_unsharded();
        rank.pipeline->reshard(1);
        EXPECT_TRUE(last.query()) << "the next gather may write to the slot";
      },
      GatherBy::Packing, /*message_rows=*/4);
}

TEST(Pieces, NeedRoomForARow) {
  const UnitLayout layout = FakeUnit::make_layout(2, "w");
  try {
    layout.parts(Wire::Gather, 23);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    expect_contains(error.what(),
                    "max_message_bytes is 23. A message needs room for one row of parameter 'w0' "
                    "from each of 2 ranks: at least 24 bytes.");
  }
}

}  // namespace
}  // namespace fsdp::test
