// Units that are resharded to a smaller group after forward: Note [group shards].
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

constexpr int kRanks = 4;
constexpr int kGroup = 2;

struct GroupPoints {
  std::vector<std::shared_ptr<MeetingPoint>> gathers;
  std::vector<std::shared_ptr<MeetingPoint>> reductions;

  GroupPoints() {
    for (int group = 0; group < kRanks / kGroup; ++group) {
      gathers.push_back(std::make_shared<MeetingPoint>(kGroup, kTimeout));
      reductions.push_back(std::make_shared<MeetingPoint>(kGroup, kTimeout));
    }
  }
};

// Six units, all but the root resharded to groups of two ranks. A bucket has room for two.
void on_grouped_ranks(const std::function<void(Rank&, int)>& body,
                      GatherBy gather_by = GatherBy::Packing, int message_rows = 0) {
  const GroupPoints points;
  on_bucketed_ranks(
      kRanks,
      [&](Rank& rank, int r) {
        const auto group = static_cast<std::size_t>(r / kGroup);
        auto* gather = new ThreadsCommunicator(points.gathers[group], r % kGroup, gather_by);
        rank.lanes.groups.emplace_back(
            new Lanes(make_lanes(gather, points.reductions[group], r % kGroup, kTimeout)));
        for (int i = 1; i <= rank.layers(); ++i) {
          set_reshard_after_forward(*rank.pipeline, i, true, kGroup);
        }
        body(rank, r);
      },
      gather_by, message_rows);
}

std::vector<CollectiveRecord> gathers_of(Rank& rank, const std::function<void()>& body) {
  Ledger& ledger = rank.pipeline->ledger();
  ledger.reset();
  ledger.enable_log(true);
  body();
  std::vector<CollectiveRecord> gathers;
  for (const CollectiveRecord& record : ledger.take_log()) {
    if (record.op == Collective::AllGather || record.op == Collective::GroupAllGather) {
      gathers.push_back(record);
    }
  }
  ledger.enable_log(false);
  return gathers;
}

std::vector<int> first_units(const std::vector<CollectiveRecord>& records, Collective op,
                             Phase phase) {
  std::vector<int> units;
  for (const CollectiveRecord& record : records) {
    if (record.op == op && record.phase == phase) {
      units.push_back(record.units.first);
    }
  }
  return units;
}

bool keeps_anything(const Rank& rank) {
  const auto& buckets = rank.pipeline->units().buckets();
  return std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) {
    return bucket->gather.group() != nullptr && bucket->gather.group()->kept_from.valid;
  });
}

TEST(GroupShards, TrainAsShardsOfAllRanksDo) {
  for (const GatherBy by : kAllWaysToGather) {
    for (const int message_rows : {0, 1, 2, 5, 100}) {
      on_grouped_ranks([](Rank& rank, int r) { expect_steps_train(rank, r, kRanks, {}); }, by,
                       message_rows);
    }
  }
}

TEST(GroupShards, DoNotDependOnHowLongAStreamTakes) {
  for (const int message_rows : {0, 2}) {
    for (const int which : {0, 1, 2}) {
      if (which != 1 && message_rows == 0) {
        continue;  // there are no streams of copies
      }
      on_grouped_ranks(
          [&](Rank& rank, int r) {
            rank.forward(rank.in_order());
            rank.pipeline->reset();
            Lane& lane = rank.lanes.gather;
            expect_steps_train(
                rank, r, kRanks, {[&]() -> Stream& {
                  return which == 0 ? lane.before() : which == 1 ? lane.stream() : lane.after();
                }});
          },
          GatherBy::Packing, message_rows);
    }
  }
}

TEST(GroupShards, BackwardGathersFromTheGroupWhatHasLeftItsSlot) {
  on_grouped_ranks([](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    const auto records = gathers_of(rank, [&] { rank.step(1.0F); });
    EXPECT_EQ(first_units(records, Collective::AllGather, Phase::Forward),
              (std::vector<int>{0, 1, 3, 5}));
    EXPECT_EQ(first_units(records, Collective::AllGather, Phase::Backward), std::vector<int>{});
    EXPECT_EQ(first_units(records, Collective::GroupAllGather, Phase::Backward),
              std::vector<int>{1});
    EXPECT_EQ(first_units(records, Collective::GroupAllGather, Phase::Forward), std::vector<int>{});
    EXPECT_EQ(rank.pipeline->ledger().counters().group_all_gathers, 1U);
  });
}

TEST(GroupShards, ShardsThatChangeBeforeBackwardAreGatheredFromAllRanks) {
  on_grouped_ranks([](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    const std::vector<int> order = rank.in_order();
    const std::vector<CallId> calls = rank.forward(order);
    EXPECT_TRUE(keeps_anything(rank));
    rank.unit(1).change_shard();
    const auto records = gathers_of(rank, [&] { rank.backward(order, calls, 1.0F); });
    EXPECT_EQ(first_units(records, Collective::AllGather, Phase::Backward), std::vector<int>{1});
    EXPECT_EQ(first_units(records, Collective::GroupAllGather, Phase::Backward),
              std::vector<int>{});
  });
}

TEST(GroupShards, AreUsedForOneBackwardAndNotMadeByAnEvaluation) {
  on_grouped_ranks([](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    EXPECT_FALSE(keeps_anything(rank));
    rank.pipeline->begin_forward(0, /*with_gradient=*/false);
    for (int i = 0; i <= rank.layers(); ++i) {
      rank.pipeline->pre_forward(i);
      rank.unit(i).expect_unsharded();
      rank.pipeline->post_forward(i, /*with_gradient=*/false);
    }
    rank.pipeline->end_forward(/*with_gradient=*/false);
    EXPECT_FALSE(keeps_anything(rank));
    const std::vector<int> order = rank.in_order();
    const std::vector<CallId> first = rank.forward(order);
    const std::vector<CallId> second = rank.forward(order);
    const auto gathers_of_backward = [&](const std::vector<CallId>& calls) {
      BackwardGraph graph;
      graph.calls = calls;
      graph.is_whole = false;
      return gathers_of(rank, [&] { rank.backward(order, calls, 1.0F, graph); });
    };
    const auto of_second = gathers_of_backward(second);
    EXPECT_EQ(first_units(of_second, Collective::GroupAllGather, Phase::Backward),
              std::vector<int>{1});
    EXPECT_EQ(first_units(of_second, Collective::AllGather, Phase::Backward), std::vector<int>{});
    EXPECT_FALSE(keeps_anything(rank));
    const auto of_first = gathers_of_backward(first);
    EXPECT_EQ(first_units(of_first, Collective::GroupAllGather, Phase::Backward),
              std::vector<int>{});
  });
}

TEST(GroupShards, AnAbandonedForwardLeavesNone) {
  on_grouped_ranks([](Rank& rank, int r) {
    rank.step(1.0F);
    rank.forward(rank.in_order());
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(1);
    rank.pipeline->reset();
    EXPECT_FALSE(keeps_anything(rank));
    expect_steps_train(rank, r, kRanks, {});
  });
}

TEST(GroupShards, OverflowSlotsAreReadBeforeTheyAreFreed) {
  on_grouped_ranks([](Rank& rank, int r) {
    rank.step(1.0F);
    rank.step(1.0F);
    for (const int i : {1, 3, 5}) {  // one more than the ring has slots
      rank.pipeline->unshard(i);
      rank.pipeline->wait_for_unshard(i);
    }
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 1U);
    rank.lanes.device->delay(rank.lanes.gather.stream(), std::chrono::milliseconds(5));
    const std::vector<int> order = rank.in_order();
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    rank.unit(1).expect_gradient(0, 1.5F);
  });
}

TEST(GroupShards, TakeOneOfKPartsOfABucketAndNoMoreStaging) {
  on_grouped_ranks([](Rank& rank, int) {
    rank.step(1.0F);
    for (const auto& bucket : rank.pipeline->units().buckets()) {
      const BucketBuffers plain = buffers_of(bucket->layout, GatherBy::Packing, MessageLimits{});
      const bool is_root = bucket->number == 0;
      EXPECT_EQ(bucket->buffers.group_shard,
                is_root ? 0U : bucket->gather.group()->layout.gather_bytes());
      EXPECT_EQ(bucket->buffers.staging, plain.staging);
    }
  });
}

TEST(GroupShards, SettingAllRanksAgainFreesThem) {
  on_grouped_ranks([](Rank& rank, int r) {
    rank.step(1.0F);
    for (int i = 1; i <= rank.layers(); ++i) {
      set_reshard_after_forward(*rank.pipeline, i, true);
    }
    expect_steps_train(rank, r, kRanks, {});
    for (const auto& bucket : rank.pipeline->units().buckets()) {
      EXPECT_EQ(bucket->gather.group(), nullptr);
    }
  });
}

}  // namespace
}  // namespace fsdp::test
