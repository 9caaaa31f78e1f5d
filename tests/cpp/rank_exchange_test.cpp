// What ranks compare: at the end of backward, parameters that only some of them used, and
// collectives that differ.
#include "core/agree/rank_exchange.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "message_of.h"
#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

// Runs a backward in which this rank has no gradient of parameter 1 of `unit`. Returns the units
// whose buckets were reduced, in their order.
std::vector<int> backward_without(Rank& rank, int without, bool passes_inputs) {
  const std::vector<int> order = rank.in_order();
  const std::vector<CallId> calls = rank.forward(order);
  return sent_by(
             rank,
             [&] {
               rank.pipeline->backward().begin_backward();
               rank.pipeline->backward().pre_backward(0, calls[0]);
               for (auto i = order.rbegin(); i != order.rend(); ++i) {
                 rank.pipeline->backward().pre_backward(*i, calls[static_cast<std::size_t>(*i)]);
                 for (std::size_t param = 0; param < (*i == without ? 1U : 2U); ++param) {
                   rank.unit(*i).add_gradient(param, 1.0F);
                   rank.pipeline->backward().gradient_arrived(*i, param);
                 }
                 if (passes_inputs) {
                   rank.pipeline->backward().post_backward(*i, calls[static_cast<std::size_t>(*i)]);
                 }
               }
               rank.add_gradients(0, 1.0F);
               rank.pipeline->backward().end_backward();
             })
      .reduced;
}

TEST(RankExchange, AParameterThatOneRankUsesHasAGradientOnAllRanks) {
  for (const bool passes_inputs : {true, false}) {
    on_ranks(3, 3, [&](Rank& rank, int r) {
      for (int step = 0; step < 2; ++step) {
        const std::vector<int> reduced = backward_without(rank, r == 1 ? 0 : 2, passes_inputs);
        EXPECT_EQ(reduced, (std::vector<int>{3, 2, 1, 0})) << "on rank " << r;
        EXPECT_TRUE(rank.unit(2).has_sharded_gradient(1));
        rank.unit(2).expect_gradient(0, 1.0F);
        rank.unit(2).expect_gradient(1, 1.0F / 3);
        for (const auto& unit : rank.units) {
          unit->zero_grad();
          unit->change_shard();
        }
      }
    });
  }
}

// On rank 1 no hook of unit 3 runs, and none when backward has passed a unit's inputs.
TEST(RankExchange, ARankOnWhichHooksDoNotRunIssuesTheSame) {
  on_ranks(2, 5, [&](Rank& rank, int r) {
    rank.step(1.0F);
    const std::vector<CallId> calls = rank.forward(rank.in_order());
    const Sent sent = sent_by(rank, [&] {
      rank.pipeline->backward().begin_backward();
      for (const int i : r == 1 ? std::vector<int>{5, 4, 2, 1} : std::vector<int>{5, 4, 3, 2, 1}) {
        const CallId call = calls[static_cast<std::size_t>(i)];
        rank.pipeline->backward().pre_backward(i, call);
        rank.unit(i).expect_unsharded();
        rank.add_gradients(i, 1.0F);
        if (r == 0) {
          rank.pipeline->backward().post_backward(i, call);
        }
      }
      rank.pipeline->backward().end_backward();
    });
    EXPECT_EQ(sent.backward, (std::vector<int>{3, 2, 1})) << "on rank " << r;
    EXPECT_EQ(sent.reduced, (std::vector<int>{5, 4, 3, 2, 1, 0})) << "on rank " << r;
    rank.unit(3).expect_gradient(0, 0.5F);
    EXPECT_TRUE(rank.unit(3).has_sharded_gradient(0));
    EXPECT_FALSE(rank.unit(0).has_sharded_gradient(0));
  });
}

TEST(RankExchange, AParameterThatNoRankUsesHasNone) {
  on_ranks(2, 3, [&](Rank& rank, int) {
    backward_without(rank, 2, /*passes_inputs=*/true);
    EXPECT_TRUE(rank.unit(2).has_sharded_gradient(0));
    EXPECT_FALSE(rank.unit(2).has_sharded_gradient(1));
  });
}

TEST(RankExchange, WithoutPeersARankHasItsOwnGradientsOnly) {
  PipelineOptions options;
  options.has_peers = false;
  on_ranks(
      2, 3,
      [&](Rank& rank, int r) {
        backward_without(rank, r == 1 ? 0 : 2, /*passes_inputs=*/true);
        EXPECT_EQ(rank.unit(2).has_sharded_gradient(1), r == 1);
      },
      options);
}

TEST(RankExchange, ATimeoutIsReportedAlthoughAnAnswerMayStillCome) {
  const auto gather_point = std::make_shared<MeetingPoint>(2, kTimeout);
  const auto reduce_point = std::make_shared<MeetingPoint>(2, kTimeout);
  Lanes lanes = make_lanes(new ThreadsCommunicator(gather_point, 0), reduce_point, 0,
                           std::chrono::milliseconds(20));
  RankExchange exchange(lanes, nullptr, /*has_peers=*/true);
  EXPECT_THROW(exchange.all_gather("an exchange", "mine"), TimeoutError);
  gather_point->meet(1, "ours", [](const std::vector<const void*>& messages) {
    EXPECT_EQ(std::string(static_cast<const char*>(messages[0]), 4), "mine");
  });
}

// All units have the same size, so the transport notices nothing.
TEST(RankExchange, RanksThatRunUnitsInAnotherOrderSayWhereTheyDiffer) {
  PipelineOptions options;
  options.prefetch_depth = 0;  // a prefetch would follow the recorded order on both ranks
  options.mesh_ranks = {4, 6};
  const auto body = [](Rank& rank, int r) {
    rank.step(1.0F);
    rank.step(1.0F);
    const std::string message = message_of([&] {
      Pipeline& pipeline = *rank.pipeline;
      pipeline.begin_forward();
      for (const int unit : r == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 2, 1, 3}) {
        pipeline.pre_forward(unit);
        if (unit > 0) {
          pipeline.post_forward(unit);
        }
      }
      const CallId call = pipeline.post_forward(0);
      pipeline.end_forward();
      pipeline.backward().begin_backward();
      pipeline.backward().pre_backward(0, call);
      rank.add_gradients(0, 1.0F);
      pipeline.backward().end_backward();
    });
    expect_contains(message, "issued different collectives on the gather lane");
    expect_contains(message, "the all-gather of unit 'unit2'");
    expect_contains(message, "The last collectives of rank 4:");
    expect_contains(message, "The last collectives of rank 6:");
  };
  on_ranks(2, 3, body, options);
}

}  // namespace
}  // namespace fsdp::test
