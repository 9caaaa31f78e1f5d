// Buckets of several units: what is gathered and reduced, and what the units see.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "message_of.h"
#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

class BucketsOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, BucketsOnRanks, ::testing::Values(1, 2, 3));

TEST_P(BucketsOnRanks, TrainAsSingleUnitsDo) {
  const int world_size = GetParam();
  for (const GatherBy by : kAllWaysToGather) {
    on_bucketed_ranks(
        world_size,
        [&](Rank& rank, int r) {
          expect_steps_train(rank, r, world_size,
                             {[&]() -> Stream& { return rank.lanes.gather.stream(); },
                              [&]() -> Stream& { return rank.lanes.reduce.stream(); }});
          if (world_size > 1) {
            EXPECT_EQ(buckets_of(rank),
                      (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5, 6}}));
            EXPECT_EQ(rank.unit(1).moves(), 1);
            EXPECT_EQ(rank.unit(0).moves(), 0);
          }
        },
        by);
  }
}

TEST(Buckets, AreFormedByTheFirstIterationOrOnCommandAndNotByAsking) {
  on_bucketed_ranks(1, [](Rank& rank, int) {
    EXPECT_EQ(rank.pipeline->unit(1).bucket, nullptr);
    EXPECT_TRUE(rank.pipeline->units().buckets().empty());
    rank.pipeline->units().form_if_none();
    const Bucket* bucket = rank.pipeline->unit(1).bucket;
    rank.pipeline->units().form_if_none();
    EXPECT_EQ(rank.pipeline->unit(1).bucket, bucket);
  });
}

TEST(Buckets, AreGatheredAndReducedOnceForAllTheirUnits) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    for (int step = 0; step < 2; ++step) {
      const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
      EXPECT_EQ(sent.forward, (std::vector<int>{0, 1, 3, 5}));
      EXPECT_EQ(sent.backward, (std::vector<int>{1}));  // the other two are still in the ring
      EXPECT_EQ(sent.reduced, (std::vector<int>{5, 3, 1, 0}));
      const Counters& counters = rank.pipeline->ledger().counters();
      EXPECT_EQ(counters.reused_unshards, 2U);
      EXPECT_EQ(counters.overflow_slots, 0U);
      EXPECT_EQ(counters.peak_unsharded_units, 5);
      EXPECT_EQ(counters.unsharded_units, 0);
      EXPECT_EQ(counters.unsharded_bytes, 0U);
      const std::size_t of_one = rank.pipeline->unit(1).layout.unsharded_bytes();
      EXPECT_EQ(counters.peak_unsharded_bytes, 5 * of_one);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 2);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slot_bytes, 2 * of_one);
    }
  });
}

TEST(Buckets, FollowTheOrderThatForwardTakes) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    const std::vector<int> order = {6, 1, 5, 2, 4, 3};
    for (int step = 0; step < 4; ++step) {
      rank.backward(order, rank.forward(order), 1.0F);
      for (const auto& unit : rank.units) {
        unit->expect_gradient(1, 1.0F);
        unit->zero_grad();
        unit->change_shard();
      }
    }
    EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {4, 3}, {5, 2}, {6, 1}}));
    EXPECT_EQ(rank.unit(1).moves(), 2);
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
  });
}

TEST(Buckets, AForwardThatLeavesUnitsOutStillReducesAndReleasesSlots) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    for (const std::vector<int>& order :
         std::vector<std::vector<int>>{{1, 3, 4, 6}, {2, 5}, {6, 5, 4, 3, 2, 1}, {1, 2, 1, 2, 5}}) {
      rank.pipeline->ledger().reset();
      std::vector<CallId> calls = rank.forward(order);
      std::vector<int> once;
      for (const int unit : order) {
        if (std::find(once.begin(), once.end(), unit) == once.end()) {
          once.push_back(unit);
        }
      }
      rank.backward(once, calls, 3.0F);
      for (int i = 0; i <= 6; ++i) {
        const bool ran = i == 0 || std::find(once.begin(), once.end(), i) != once.end();
        EXPECT_EQ(rank.unit(i).has_sharded_gradient(0), ran);
        if (ran) {
          rank.unit(i).expect_gradient(0, 3.0F);
        }
        EXPECT_FALSE(rank.unit(i).is_attached());
        rank.unit(i).zero_grad();
        rank.unit(i).change_shard();
      }
      EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
      EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
    }
    const Sent sent = sent_by(rank, [&] {
      const std::vector<int> order = {1, 3, 4, 6};
      rank.backward(order, rank.forward(order), 1.0F);
    });
    EXPECT_EQ(sent.reduced,
              (std::vector<int>{5, 3, 1, 0}));  // during backward, not only at its end
  });
}

TEST(Buckets, AUnitThatForwardHasLeftOutHoldsNoSlotThatAGatherAheadNeeds) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.pipeline->begin_forward(/*outermost=*/0, /*with_gradient=*/false);
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(2);
    rank.pipeline->post_forward(2, /*with_gradient=*/false);  // without unit 1 of the same bucket
    rank.pipeline->pre_forward(4);
    EXPECT_EQ(rank.pipeline->unit(5).gather.state(), UnitState::Gathering);
    EXPECT_EQ(rank.pipeline->unit(1).gather.state(), UnitState::Sharded);
    rank.pipeline->post_forward(4, /*with_gradient=*/false);
    rank.pipeline->post_forward(0, /*with_gradient=*/false);
    rank.pipeline->end_forward(/*with_gradient=*/false);
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
  });
}

TEST(Buckets, AreNotFoundAgainInASlotFromBeforeTheirLastGather) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.pipeline->begin_forward(/*outermost=*/0, /*with_gradient=*/false);
    for (int round = 0; round < 2; ++round) {  // with the two slots in both orders
      rank.pipeline->unshard(1);
      rank.pipeline->wait_for_unshard(1);
      rank.lanes.gather.synchronize();
      rank.unit(2).change_shard();
      rank.pipeline->reshard(2);
      rank.pipeline->unshard(2);  // into another slot, since unit 1 uses the first one
      rank.pipeline->wait_for_unshard(2);
      rank.unit(2).expect_unsharded();
      rank.pipeline->reshard(1);
      rank.pipeline->reshard(2);
      rank.pipeline->unshard(2);
      rank.pipeline->wait_for_unshard(2);
      rank.unit(2).expect_unsharded();
      rank.pipeline->reshard(1);
      rank.pipeline->reshard(2);
    }
    rank.pipeline->reset();
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
  });
}

TEST(Buckets, AreNotFoundAgainInASlotOfTheirOwnFromBeforeTheirLastGather) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    const auto set_both = [&rank](bool reshards) {
      set_reshard_after_forward(*rank.pipeline, 1, reshards);
      set_reshard_after_forward(*rank.pipeline, 2, reshards);
    };
    const auto unshard = [&rank](int unit) {
      rank.pipeline->unshard(unit);
      rank.pipeline->wait_for_unshard(unit);
      rank.unit(unit).expect_unsharded();
      rank.lanes.gather.synchronize();
      rank.pipeline->reshard(1);
      rank.pipeline->reshard(2);
    };
    rank.step(1.0F);
    set_both(false);
    rank.step(1.0F);
    rank.pipeline->begin_forward(/*outermost=*/0, /*with_gradient=*/false);
    unshard(1);  // in a slot that only this bucket uses
    set_both(true);
    rank.unit(2).change_shard();
    unshard(2);  // in a slot of the ring
    unshard(2);
    rank.pipeline->reset();
  });
}

TEST(Buckets, UnitsThatDifferInSyncOrScaleAreReducedByThemselves) {
  on_bucketed_ranks(2, [](Rank& rank, int r) {
    rank.step(1.0F);
    const std::vector<int> order = rank.in_order();
    set_requires_gradient_sync(*rank.pipeline, 1, false);
    set_requires_gradient_sync(*rank.pipeline, 4, false);
    for (int step = 0; step < 2; ++step) {
      const std::vector<CallId> calls = rank.forward(order);
      if (step == 1) {
        change_settings(*rank.pipeline, 5, [](UnitSettings& settings) {
          settings.pre_scale = settings.post_scale = 1.0;  // a sum from now on
        });
      }
      rank.backward(order, calls, static_cast<float>(r));
    }
    EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
    rank.unit(2).expect_gradient(0, 1.0F);
    rank.unit(3).expect_gradient(1, 1.0F);
    rank.unit(5).expect_gradient(0, 1.5F);
    rank.unit(6).expect_gradient(0, 1.0F);
    set_requires_gradient_sync(*rank.pipeline, 1, true);
    set_requires_gradient_sync(*rank.pipeline, 2, false);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    rank.unit(1).expect_gradient(0, 1.5F);
    rank.unit(2).expect_gradient(0, 1.0F);
    EXPECT_FALSE(rank.unit(4).has_sharded_gradient(1));
    for (int i = 1; i <= 6; ++i) {
      set_requires_gradient_sync(*rank.pipeline, i, true);
    }
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    rank.unit(1).expect_gradient(1, 2.0F);
    rank.unit(2).expect_gradient(1, 2.0F);
    rank.unit(4).expect_gradient(0, 2.0F);
    rank.unit(5).expect_gradient(0, 3.5F);
    // The scales differ and nothing is accumulated any more, so the two no longer share a bucket.
    rank.forward(order);
    EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5}, {6}}));
  });
}

TEST(Buckets, AccumulateWithoutSyncAsOne) {
  on_bucketed_ranks(2, [](Rank& rank, int r) {
    const std::vector<int> order = rank.in_order();
    for (const bool sync : {false, false, true}) {
      for (int i = 0; i <= 6; ++i) {
        set_requires_gradient_sync(*rank.pipeline, i, sync);
      }
      const Sent sent =
          sent_by(rank, [&] { rank.backward(order, rank.forward(order), static_cast<float>(r)); });
      EXPECT_EQ(sent.reduced.size(), sync ? 4U : 0U);
    }
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.5F);
    }
  });
}

TEST(Buckets, UnitsThatTheUserUnshardsKeepTheirNeighboursOnlyUntilTheyAreResharded) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.pipeline->unshard(3);
    rank.pipeline->wait_for_unshard(3);
    rank.unit(3).expect_unsharded();
    rank.pipeline->unshard(4);
    rank.pipeline->wait_for_unshard(4);
    rank.unit(4).expect_unsharded();
    EXPECT_EQ(rank.pipeline->ledger().counters().all_gathers, 1U);
    rank.pipeline->reshard(3);
    rank.unit(4).expect_unsharded();
    rank.unit(4).change_shard();
    rank.unit(3).change_shard();
    rank.pipeline->unshard(3);  // in another slot than the old values
    rank.pipeline->wait_for_unshard(3);
    rank.unit(3).expect_unsharded();
    EXPECT_EQ(rank.pipeline->ledger().counters().all_gathers, 2U);
    rank.pipeline->reshard(3);
    rank.pipeline->reshard(4);
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
    rank.pipeline->unshard(5);  // unit 6 is gathered and resharded with it
    rank.pipeline->reshard(5);
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_units, 0);
    rank.step(1.0F);
    rank.step(1.0F);
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
  });
}

TEST(Buckets, ThatStayUnshardedAfterForwardAreReducedAndFollowNewShards) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        for (int i = 1; i <= 6; ++i) {
          set_reshard_after_forward(*rank.pipeline, i, i > 4);
        }
        for (int step = 0; step < 3; ++step) {
          const std::vector<int> order = rank.in_order();
          const std::vector<CallId> calls = rank.forward(order);
          for (int i = 1; i <= 4; ++i) {
            rank.unit(i).expect_unsharded();
          }
          rank.backward(order, calls, 2.0F);
          for (const auto& unit : rank.units) {
            unit->expect_gradient(0, 2.0F);
            unit->zero_grad();
            unit->change_shard();
          }
        }
        EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5, 6}}));
      },
      GatherBy::Packing, 2);
}

TEST(Buckets, AnAbandonedIterationLeavesNoTrace) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(1);
    const std::vector<int> order = rank.in_order();
    const std::vector<CallId> calls = rank.forward(order);
    rank.pipeline->backward().begin_backward();
    rank.pipeline->backward().pre_backward(6, calls[6]);
    rank.add_gradients(6, 100.0F);
    rank.pipeline->backward().post_backward(6, calls[6]);  // the gradients of unit 5 are missing
    rank.backward(order, rank.forward(order), 1.0F);
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
  });
}

}  // namespace
}  // namespace fsdp::test
