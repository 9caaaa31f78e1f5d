// The schedule on ranks that are threads: counts, values under delays, and errors.
#include "core/schedule/pipeline.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

class PipelineOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, PipelineOnRanks, ::testing::Values(1, 2, 3));

TEST_P(PipelineOnRanks, EveryStepGathersTheParametersAndAveragesTheGradients) {
  const int world_size = GetParam();
  on_ranks(world_size, 4, [&](Rank& rank, int r) {
    for (int step = 0; step < 3; ++step) {
      const std::vector<int> order = rank.in_order();
      rank.backward(order, rank.forward(order), static_cast<float>(r + 1 + step));
      float mean = 0.0F;
      for (int other = 0; other < world_size; ++other) {
        mean += static_cast<float>(other + 1 + step) / static_cast<float>(world_size);
      }
      for (const auto& unit : rank.units) {
        unit->expect_gradient(0, mean);
        unit->expect_gradient(1, mean);
        EXPECT_FALSE(unit->is_attached());
        unit->zero_grad();
        unit->change_shard();
      }
    }
  });
}

// See Note [gather plans].
TEST(Pipeline, GathersLargeParametersToTheirPlacesInOneGroup) {
  on_ranks(
      2, 3,
      [&](Rank& rank, int) {
        rank.step(1.0F);
        const int groups = rank.gather->groups();
        rank.pipeline->ledger().reset();
        rank.step(1.0F);
        const Counters& counters = rank.pipeline->ledger().counters();
        EXPECT_EQ(counters.all_gathers, 5U);
        EXPECT_EQ(rank.gather->groups() - groups, 5);
        EXPECT_EQ(rank.pipeline->gatherer().staging_bytes(), 0U);
        // Only gradients are copied, into the reduce input: two parameters of two chunks of four
        // rows.
        EXPECT_EQ(counters.copied_bytes, 4U * 2 * 2 * (4 * kColumns) * 4 * 2);
      },
      {}, GatherBy::Size);
}

TEST(Pipeline, GathersOnceMoreThanUnitsInForwardAndTwiceLessInBackward) {
  constexpr int kLayers = 5;
  on_ranks(2, kLayers, [&](Rank& rank, int) {
    rank.step(1.0F);
    for (int step = 0; step < 3; ++step) {
      rank.pipeline->ledger().reset();
      rank.pipeline->ledger().enable_log(true);
      rank.step(1.0F);
      std::vector<int> forward;
      std::vector<int> backward;
      std::vector<int> reduced;
      for (const CollectiveRecord& record : rank.pipeline->ledger().take_log()) {
        if (record.op == Collective::ReduceScatter) {
          reduced.push_back(record.units.first);
        } else {
          (record.phase == Phase::Forward ? forward : backward).push_back(record.units.first);
        }
      }
      EXPECT_EQ(forward, (std::vector<int>{0, 1, 2, 3, 4, 5}));
      EXPECT_EQ(backward, (std::vector<int>{3, 2, 1}));
      EXPECT_EQ(reduced, (std::vector<int>{5, 4, 3, 2, 1, 0}));
      const Counters& counters = rank.pipeline->ledger().counters();
      EXPECT_EQ(counters.reused_unshards, 2U);
      EXPECT_EQ(counters.overflow_slots, 0U);
      EXPECT_EQ(counters.peak_unsharded_units, 3);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 2);
    }
  });
}

// See Note [gathers ahead of forward] in core/schedule/pipeline.h.
TEST(Pipeline, FirstGathersOfForwardAreIssuedAheadAndAgainForChangedShards) {
  on_ranks(2, 5, [&](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    for (const bool changes : {false, true, false}) {
      rank.pipeline->gatherer().set_poison_released_slots(changes);
      rank.lanes.device->delay(rank.lanes.gather.stream(), std::chrono::milliseconds(20));
      rank.pipeline->ledger().reset();
      rank.pipeline->ledger().enable_log(true);
      rank.pipeline->prefetch_next_forward();
      rank.pipeline->prefetch_next_forward();  // gathers them again
      if (changes) {
        rank.lanes.gather.synchronize();  // the gathers read the shards
        rank.units[0]->change_shard();
        rank.units[1]->change_shard();
      }
      rank.step(1.0F);
      std::vector<int> ahead;
      std::vector<int> forward;
      std::vector<int> backward;
      for (const CollectiveRecord& record : rank.pipeline->ledger().take_log()) {
        if (record.op == Collective::AllGather) {
          std::vector<int>& phase = record.phase == Phase::Forward    ? forward
                                    : record.phase == Phase::Backward ? backward
                                                                      : ahead;
          phase.push_back(record.units.first);
        }
      }
      EXPECT_EQ(ahead, (std::vector<int>{0, 1, 0, 1}));
      EXPECT_EQ(forward,
                changes ? (std::vector<int>{0, 1, 2, 3, 4, 5}) : (std::vector<int>{2, 3, 4, 5}));
      EXPECT_EQ(backward,
                changes ? (std::vector<int>{5, 4, 3, 2, 1}) : (std::vector<int>{3, 2, 1}));
      EXPECT_EQ(rank.pipeline->ledger().counters().dropped_gathers, changes ? 4U : 2U);
      EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
    }
  });
}

class CountingUpdate final : public UnitUpdate {
 public:
  void run(Stream* /*stream*/) override { runs += 1; }

  int runs = 0;
};

// See Note [updates in backward] in core/reduce/unit_update.h.
TEST(Pipeline, GradientsThatComeAfterTheUpdateOfTheirUnitAreRefused) {
  on_ranks(2, 3, [](Rank& rank, int) {
    const auto update = std::make_shared<CountingUpdate>();
    for (const int i : {1, 2, 3}) {
      change_settings(*rank.pipeline, i, [&](UnitSettings& settings) { settings.update = update; });
    }
    const std::vector<CallId> calls = rank.forward({1, 2, 3});
    rank.pipeline->backward().begin_backward();
    for (const int i : {3, 2, 1}) {
      rank.pipeline->backward().pre_backward(i, calls[static_cast<std::size_t>(i)]);
      rank.add_gradients(i, 1.0F);
      rank.pipeline->backward().post_backward(i, calls[static_cast<std::size_t>(i)]);
    }
    EXPECT_EQ(update->runs, 1);
    rank.add_gradients(3, 1.0F);
    try {
      rank.pipeline->backward().end_backward();
      ADD_FAILURE() << "more gradients were accepted";
    } catch (const Error& error) {
      expect_contains(error.what(), "'unit3' got more gradients after its attached optimizer");
    }
    rank.pipeline->reset();
  });
}

class NotedUpdate final : public UnitUpdate {
 public:
  NotedUpdate(int unit, std::vector<int>& measured, std::vector<int>& updated)
      : unit_(unit), measured_(measured), updated_(updated) {}

  void run(Stream* /*stream*/) override { updated_.push_back(unit_); }
  void measure(Stream* /*stream*/) override { measured_.push_back(unit_); }
  bool measures() const override { return true; }

 private:
  int unit_;
  std::vector<int>& measured_;
  std::vector<int>& updated_;
};

TEST(Pipeline, AllRanksMeasureUnitsInTheOrderOfReductions) {
  on_ranks(2, 3, [](Rank& rank, int r) {
    std::vector<int> measured;
    std::vector<int> updated;
    for (const int i : {1, 2, 3}) {
      change_settings(*rank.pipeline, i, [&](UnitSettings& settings) {
        settings.update = std::make_shared<NotedUpdate>(i, measured, updated);
      });
    }
    const std::vector<CallId> calls = rank.forward({1, 2, 3});
    rank.pipeline->backward().begin_backward();
    for (const int i : {3, 2, 1}) {
      rank.pipeline->backward().pre_backward(i, calls[static_cast<std::size_t>(i)]);
      if (i != 3 || r == 0) {  // rank 1 has no gradient of unit 3
        rank.add_gradients(i, 1.0F);
      }
      rank.pipeline->backward().post_backward(i, calls[static_cast<std::size_t>(i)]);
    }
    rank.pipeline->backward().end_backward();
    EXPECT_EQ(measured, (std::vector<int>{3, 2, 1}));
    EXPECT_EQ(updated, r == 0 ? (std::vector<int>{3, 2, 1}) : (std::vector<int>{2, 1, 3}));
  });
}

TEST(Pipeline, DeeperPrefetchUsesAsManySlotsMoreAndNoOthers) {
  PipelineOptions options;
  options.prefetch_depth = 3;
  on_ranks(
      2, 6,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.step(1.0F);
        EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 4);
        EXPECT_EQ(rank.pipeline->ledger().counters().peak_unsharded_units, 5);
        EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
        rank.pipeline->options().prefetch_depth = 1;
        rank.step(1.0F);
        EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 2);
        rank.pipeline->prefetch_next_forward();
        rank.pipeline->options().prefetch_depth = 3;  // so the gathers ahead leave the ring
        rank.step(1.0F);
        EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 4);
      },
      options);
}

TEST(Pipeline, TheRingHasASlotForEachUnitThatTheUserPrefetches) {
  on_ranks(2, 6, [](Rank& rank, int) {
    change_settings(*rank.pipeline, 2,
                    [](UnitSettings& settings) { settings.forward_prefetch = {3, 4}; });
    rank.step(1.0F);
    EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 3);
    change_settings(*rank.pipeline, 6,
                    [](UnitSettings& settings) { settings.backward_prefetch = {5, 4, 3}; });
    rank.step(1.0F);
    EXPECT_EQ(rank.pipeline->gatherer().ring()->plan().slots, 4);
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
  });
}

TEST(Pipeline, ResultsDoNotDependOnHowLongAStreamTakes) {
  for (const bool delay_gather : {true, false}) {
    on_ranks(2, 3, [&](Rank& rank, int r) {
      rank.pipeline->gatherer().set_poison_released_slots(true);
      for (int step = 0; step < 3; ++step) {
        Stream& stream = delay_gather ? rank.lanes.gather.stream() : rank.lanes.reduce.stream();
        rank.lanes.device->delay(stream, std::chrono::milliseconds(20));
        const std::vector<int> order = rank.in_order();
        rank.backward(order, rank.forward(order), static_cast<float>(r));
        for (const auto& unit : rank.units) {
          unit->expect_gradient(0, 0.5F);
          unit->zero_grad();
          unit->change_shard();
        }
      }
    });
  }
}

TEST(Pipeline, ForwardsThatLeaveUnitsOutOrReorderThemStayRight) {
  on_ranks(2, 4, [](Rank& rank, int) {
    for (const std::vector<int>& order :
         std::vector<std::vector<int>>{{1, 2, 3, 4}, {1, 3, 4}, {4, 3, 2, 1}, {2}, {1, 2, 3, 4}}) {
      rank.backward(order, rank.forward(order), 1.0F);
      for (const auto& unit : rank.units) {
        EXPECT_FALSE(unit->is_attached());
        unit->zero_grad();
        unit->change_shard();
      }
    }
  });
}

void set_syncs(Rank& rank, bool value) {
  for (int i = 0; i <= rank.layers(); ++i) {
    set_requires_gradient_sync(*rank.pipeline, i, value);
  }
}

TEST(Pipeline, AccumulatesWithoutSyncAndAddsToShardedGradients) {
  on_ranks(2, 2, [](Rank& rank, int r) {
    const std::vector<int> order = rank.in_order();
    set_syncs(rank, false);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 0U);
    set_syncs(rank, true);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
    rank.backward(order, rank.forward(order), 2.0F);  // added to the sharded gradient
    for (const auto& unit : rank.units) {
      unit->expect_gradient(1, 3.0F);
    }
  });
}

TEST(Pipeline, MissingGradientsAreReducedAtTheEndAndLeftWithoutAGradient) {
  on_ranks(2, 2, [](Rank& rank, int) {
    const std::vector<CallId> calls = rank.forward(rank.in_order());
    BackwardGraph graph;
    graph.is_whole = false;
    graph.calls = {calls[2]};
    rank.pipeline->backward().begin_backward(/*may_reshard=*/true, graph);
    rank.pipeline->backward().pre_backward(2, calls[2]);
    rank.unit(2).add_gradient(0, 4.0F);
    rank.pipeline->backward().gradient_arrived(2, 0);
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 0U);
    rank.pipeline->backward().end_backward();
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 2U);  // of unit 2, and the root
    rank.unit(2).expect_gradient(0, 4.0F);
    EXPECT_TRUE(rank.unit(2).has_sharded_gradient(0));
    EXPECT_FALSE(rank.unit(2).has_sharded_gradient(1));
    EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
  });
}

// See Note [gradient lifetime]. Rank 1 keeps the message of unit 2 on the wire.
TEST(Pipeline, BackwardWaitsForPackedGradientsAndNotForTheirMessage) {
  std::promise<void> passed;
  on_ranks(2, 2, [&](Rank& rank, int r) {
    for (int i = 1; i <= 2; ++i) {
      set_reshard_after_forward(*rank.pipeline, i, false);  // backward gathers nothing
    }
    const std::vector<CallId> calls = rank.forward(rank.in_order());
    if (r == 1) {
      EXPECT_EQ(passed.get_future().wait_for(kTimeout / 4), std::future_status::ready);
    }
    BackwardSchedule& backward = rank.pipeline->backward();
    backward.begin_backward();
    backward.pre_backward(0, calls[0]);
    for (const int i : {2, 1}) {
      backward.pre_backward(i, calls[static_cast<std::size_t>(i)]);
      rank.add_gradients(i, 1.0F);
      backward.post_backward(i, calls[static_cast<std::size_t>(i)]);
    }
    if (r == 0) {
      EXPECT_FALSE(rank.pipeline->unit(2).bucket->reduction.reduced().query());
      passed.set_value();
    }
    rank.add_gradients(0, 1.0F);
    backward.end_backward();
    rank.unit(2).expect_gradient(0, 1.0F);
  });
}

TEST(Pipeline, AnAbandonedForwardOrBackwardLeavesNoTrace) {
  on_ranks(2, 3, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(1);  // and the gather of unit 2 is in flight
    rank.step(1.0F);
    const std::vector<CallId> calls = rank.forward(rank.in_order());
    rank.pipeline->backward().begin_backward();
    rank.pipeline->backward().pre_backward(3, calls[3]);
    rank.unit(3).add_gradient(0, 100.0F);
    rank.pipeline->backward().gradient_arrived(3, 0);
    const std::vector<int> order = rank.in_order();
    rank.backward(order, rank.forward(order), 1.0F);
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
  });
}

TEST(Pipeline, UnitsThatTheUserUnshardsGetOverflowSlotsThatAreFreed) {
  on_ranks(2, 4, [](Rank& rank, int) {
    for (int i = 1; i <= 4; ++i) {
      rank.pipeline->unshard(i);
      rank.pipeline->wait_for_unshard(i);
    }
    for (int i = 1; i <= 4; ++i) {
      rank.unit(i).expect_unsharded();
    }
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 2U);
    for (int i = 1; i <= 4; ++i) {
      rank.pipeline->reshard(i);
    }
    const BufferRing* ring = rank.pipeline->gatherer().ring();
    EXPECT_EQ(ring->allocated_bytes(), 2 * ring->plan().slot_bytes);
    rank.step(1.0F);
  });
}

TEST(Pipeline, ReentrantRecomputationsAreReducedTogether) {
  on_ranks(2, 1, [](Rank& rank, int) {
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    for (int run = 0; run < 2; ++run) {
      rank.pipeline->pre_forward(1);
      rank.pipeline->post_forward(1, /*with_gradient=*/false);
    }
    rank.pipeline->post_forward(0);
    rank.pipeline->end_forward();
    rank.pipeline->backward().begin_backward();
    for (int run = 0; run < 2; ++run) {
      rank.pipeline->pre_forward(1);
      const CallId call = rank.pipeline->post_forward(1);
      rank.pipeline->backward().pre_backward(1, call);
      rank.add_gradients(1, 1.0F);
      rank.pipeline->backward().post_backward(1, call);
    }
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 1U);
    rank.pipeline->backward().end_backward();
    rank.unit(1).expect_gradient(0, 2.0F);
  });
}

BackwardGraph graph_for_inputs() {
  BackwardGraph graph;
  graph.accumulates = false;
  graph.is_kept = true;
  return graph;
}

// Zero-bubble pipelining runs a backward for the inputs of a stage, and later one for the weights.
TEST(Pipeline, BackwardsForInputsNoteUnitsThatWereShardedWhenTheyBegan) {
  on_ranks(2, 2, [&](Rank& rank, int) {
    const std::vector<int> order = rank.in_order();
    const auto is_left_out = [&](bool syncs, bool is_followed = false) {
      set_syncs(rank, syncs);
      const std::vector<CallId> calls = rank.forward(order);
      rank.backward(order, calls, 1.0F, graph_for_inputs());
      if (is_followed) {
        rank.backward(order, calls, 1.0F);
      }
      return rank.pipeline->take_left_out() != ForwardOrder::kNoUnit;
    };
    EXPECT_TRUE(is_left_out(/*syncs=*/false));
    EXPECT_FALSE(is_left_out(/*syncs=*/true));  // the user's own
    EXPECT_FALSE(is_left_out(/*syncs=*/false, /*is_followed=*/true));
    EXPECT_TRUE(rank.pipeline->awaits_backward_of(1));
    rank.unit(1).change_shard();
    EXPECT_FALSE(rank.pipeline->awaits_backward_of(1));
  });
}

TEST(Pipeline, ABackwardForAllParametersClearsNotesOfUnitsThatItDoesNotReach) {
  on_ranks(1, 2, [&](Rank& rank, int) {
    set_syncs(rank, false);
    const std::vector<CallId> calls = rank.forward({1, 2});
    BackwardGraph graph = graph_for_inputs();
    graph.is_whole = false;
    graph.calls = {calls[1]};
    rank.backward({1}, calls, 1.0F, graph);
    graph.accumulates = true;
    graph.calls = {calls[2]};
    rank.backward({2}, calls, 1.0F, graph);
    EXPECT_EQ(rank.pipeline->take_left_out(), ForwardOrder::kNoUnit);
  });
}

// Checkpointing gathers a unit before backward reaches the unit's output.
TEST(Pipeline, ABackwardForInputsNotesAShardedUnitThatIsRecomputedFirst) {
  on_ranks(1, 1, [&](Rank& rank, int) {
    set_syncs(rank, false);
    const std::vector<CallId> calls = rank.forward({1});
    BackwardSchedule& backward = rank.pipeline->backward();
    backward.begin_backward(/*may_reshard=*/true, graph_for_inputs());
    rank.pipeline->pre_forward(1);
    rank.pipeline->post_forward(1);
    backward.pre_backward(1, calls[1]);
    backward.post_backward(1, calls[1]);
    backward.end_backward();
    EXPECT_EQ(rank.pipeline->take_left_out(), 1);
    EXPECT_EQ(rank.pipeline->take_left_out(), ForwardOrder::kNoUnit);
  });
}

// The error messages of two ranks that differ.
std::vector<std::string> messages_of_two_ranks(const std::function<void(int)>& body) {
  std::vector<std::future<std::string>> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r]() -> std::string {
      try {
        body(r);
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    }));
  }
  return {ranks[0].get(), ranks[1].get()};
}

TEST(Pipeline, TwoSchedulesShareTheLanesAndOneMayEndWhileTheOtherRuns) {
  on_ranks(2, 3, [](Rank& rank, int r) {
    auto other = std::make_unique<Pipeline>(rank.lanes, PipelineOptions{});
    FakeUnit unit(9, FakeUnit::make_layout(2, "other"), r);
    other->units().add({"other", FakeUnit::make_layout(2, "other")}, unit);
    for (int step = 0; step < 3; ++step) {
      const std::vector<int> order = rank.in_order();
      const std::vector<CallId> calls = rank.forward(order);
      if (other != nullptr) {
        other->begin_forward();
        other->pre_forward(0);
        unit.expect_unsharded();
      }
      rank.backward(order, calls, static_cast<float>(r));
      for (const auto& each : rank.units) {
        each->expect_gradient(0, 1.0F / 2);
        each->zero_grad();
      }
      if (step == 1) {
        other->unshard(0);
        other.reset();  // with its gather in flight
      } else if (other != nullptr) {
        unit.expect_unsharded();
        other->reset();
      }
    }
  });
}

TEST(Pipeline, RanksThatRunDifferentUnitsGetAnErrorThatNamesRankAndUnit) {
  auto gather_point = std::make_shared<MeetingPoint>(2, kTimeout);
  auto reduce_point = std::make_shared<MeetingPoint>(2, kTimeout);
  const auto messages = messages_of_two_ranks([&](int r) {
    Rank rank(r, 2, 2, gather_point, reduce_point);
    rank.forward(r == 0 ? std::vector<int>{1, 2} : std::vector<int>{2, 1});
  });
  expect_contains(messages[0], "rank 0 issues the all-gather of unit 'unit1'");
  expect_contains(messages[0], "rank 1 issues the all-gather of unit 'unit2'");
  expect_contains(messages[1], "rank 0 issues the all-gather of unit 'unit1'");
}

TEST(Pipeline, AFailedCollectiveThrowsInTheCodeThatWaitsForIt) {
  PipelineOptions options;
  options.check_order = false;
  on_ranks(
      2, 2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.gather->fail_next("the cable is unplugged");
        try {
          rank.forward(rank.in_order());
          FAIL() << "expected the communicator's error";
        } catch (const std::exception& error) {
          expect_contains(error.what(), "the cable is unplugged");
        }
      },
      options);
}

TEST(Pipeline, APeerThatNeverComesEndsInAnErrorThatNamesTheUnit) {
  // The meeting point waits longer than the streams do, so the streams time out first.
  auto gather_point = std::make_shared<MeetingPoint>(2, std::chrono::milliseconds(400));
  auto reduce_point = std::make_shared<MeetingPoint>(2, std::chrono::milliseconds(400));
  PipelineOptions options;
  options.check_order = false;
  Lanes lanes = make_lanes(new ThreadsCommunicator(gather_point, 0), reduce_point, 0,
                           std::chrono::milliseconds(50));
  FakeUnit unit(0, FakeUnit::make_layout(2, "w"), 0);
  Pipeline pipeline(lanes, options);
  pipeline.units().add({"lonely", FakeUnit::make_layout(2, "w")}, unit);
  pipeline.begin_forward();
  try {
    pipeline.pre_forward(0);
    FAIL() << "expected a timeout";
  } catch (const TimeoutError& error) {
    expect_contains(error.what(), "50 ms for the all-gather of unit 'lonely'");
  }
}

}  // namespace
}  // namespace fsdp::test
