// The whole CUDA side without a GPU: the schedule on csrc/device/cuda_stream over threads
// (fake_cudart), with the kernels' bodies and csrc/comm/nccl over threads (fake_nccl). All streams
// run in parallel to the host. As in torch, memory comes from an allocator that knows only the
// compute stream. Freed memory is overwritten on that stream, so a missing wait gives wrong
// numbers.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stream_ranks.h"

namespace fsdp::test {
namespace {

class CudaSchedule : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings, CudaSchedule,
                         ::testing::Values(Setting{1, kDirectBytes}, Setting{2, kDirectBytes},
                                           Setting{2, 0}, Setting{3, 300},
                                           Setting{2, kDirectBytes, 2}, Setting{2, 300, 4},
                                           Setting{2, 300, 2, 3}, Setting{3, 0, 4, 5}),
                         [](const auto& info) {
                           return std::to_string(info.param.world_size) + "RanksDirectFrom" +
                                  std::to_string(info.param.direct_bytes) + "BucketsOf" +
                                  std::to_string(info.param.bucket_units) + "MessagesOf" +
                                  std::to_string(info.param.message_rows);
                         });

TEST_P(CudaSchedule, StepsReadWhatTheyShould) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 5; ++step) {
      rank.step(static_cast<float>(r + 1 + step), mean_of(setting.world_size, step));
      rank.optimizer_step();
    }
  });
}

TEST_P(CudaSchedule, ResultsDoNotDependOnHowLateAStreamIs) {
  const Setting setting = GetParam();
  for (const std::string late : {"gather", "reduce", "compute"}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      for (int step = 0; step < 3; ++step) {
        Stream& stream = late == "compute" ? rank.lanes->device->compute_stream()
                                           : lane_named(*rank.lanes, late).stream();
        rank.lanes->device->delay(stream, std::chrono::milliseconds(15));
        rank.step(static_cast<float>(r + 1 + step), mean_of(setting.world_size, step));
        rank.lanes->device->delay(stream, std::chrono::milliseconds(15));
        rank.optimizer_step();
      }
    });
  }
}

TEST_P(CudaSchedule, ShardsThatChangeBetweenForwardAndBackwardAreReadAsTheyAre) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 3; ++step) {
      const std::vector<int> calls = rank.forward();
      rank.lanes->device->delay(rank.lanes->device->compute_stream(),
                                std::chrono::milliseconds(10));
      for (std::size_t i = 1; i < rank.units.size();
           ++i) {  // the root's parameters are gathered already
        rank.units[i]->change_shard();
      }
      rank.backward(calls, static_cast<float>(r + 1 + step));
      for (auto& unit : rank.units) {
        unit->read_gradients(mean_of(setting.world_size, step));
        unit->zero_grad();
      }
    }
  });
}

void synchronize_all(Rank& rank) {
  rank.lanes->gather.synchronize();
  rank.lanes->reduce.synchronize();
  synchronize(compute_stream);
}

TEST_P(CudaSchedule, TimesAreThoseOfTheStreamsAndNotOfTheHost) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    Ledger& ledger = rank.pipeline->ledger();
    rank.step(static_cast<float>(r + 1), mean_of(setting.world_size, 0));
    rank.pipeline->keep_times(2, /*drained=*/true);
    for (int step = 1; step < 5; ++step) {
      rank.lanes->device->delay(rank.lanes->device->compute_stream(), std::chrono::milliseconds(5));
      rank.step(static_cast<float>(r + 1 + step), mean_of(setting.world_size, step));
    }
    synchronize_all(rank);
    EXPECT_EQ(ledger.lost_iterations(), 2U);
    const std::vector<IterationTimes> iterations = ledger.take_times();
    ASSERT_EQ(iterations.size(), 2U);
    EXPECT_EQ(iterations[1].number, iterations[0].number + 1);
    for (const IterationTimes& iteration : iterations) {
      double gathered = 0.0;  // the end of the newest gather
      for (const TimedSpan& timed : iteration.spans) {
        EXPECT_GT(timed.begin, 0.0);
        EXPECT_LE(timed.begin, timed.end);
        if (timed.span.work == Work::Gather || timed.span.work == Work::Reduce) {
          EXPECT_LE(timed.issued, timed.end);
          EXPECT_GT(timed.issued, 0.0);
          EXPECT_LE(timed.possible, timed.begin + 1e-6);  // milliseconds in a float
        }
        if (timed.span.work == Work::Gather) {
          gathered = timed.end;
        } else if (timed.span.work == Work::UnitForward && timed.span.units.first == 0 &&
                   setting.world_size > 1 && setting.message_rows == 0) {
          EXPECT_GT(gathered, iteration.spans.front().begin);
        }
      }
    }
    EXPECT_TRUE(ledger.take_times().empty());
  });
}

TEST_P(CudaSchedule, AWaitOfTheComputeStreamEndsAfterItsGather) {
  const Setting setting = GetParam();
  if (setting.world_size == 1) {
    GTEST_SKIP() << "one rank has nothing to gather";
  }
  on_ranks(setting, [&](Rank& rank, int r) {
    rank.step(static_cast<float>(r + 1), mean_of(setting.world_size, 0));
    rank.pipeline->keep_times(1, /*drained=*/true);
    rank.lanes->device->delay(rank.lanes->gather.stream(), std::chrono::milliseconds(10));
    rank.step(static_cast<float>(r + 2), mean_of(setting.world_size, 1));
    synchronize_all(rank);
    const std::vector<IterationTimes> iterations = rank.pipeline->ledger().take_times();
    ASSERT_EQ(iterations.size(), 1U);
    std::vector<double> arrived(rank.units.size(), 0.0);  // of each unit's first piece
    std::size_t waits = 0;
    for (const TimedSpan& timed : iterations.front().spans) {
      const UnitRange units = timed.span.units;
      if (timed.span.work == Work::Gather) {
        for (int unit = units.first; unit <= units.last; ++unit) {
          double& at = arrived[static_cast<std::size_t>(unit)];
          at = at == 0.0 ? timed.end : at;
        }
      } else if (timed.span.work == Work::WaitForGather && timed.span.phase == Phase::Forward) {
        waits += 1;
        // Threads record the events of both, one after the other.
        EXPECT_GE(timed.end + 1e-3, arrived[static_cast<std::size_t>(units.first)]);
      }
    }
    EXPECT_EQ(waits, rank.units.size());
  });
}

TEST_P(CudaSchedule, ACaptureRecordsNoTimes) {
  on_ranks(GetParam(), [](Rank& rank, int) {
    for (auto& unit : rank.units) {
      unit->keep_gradients();
    }
    rank.step(2.0F, 2.0F);
    rank.step(2.0F, 2.0F);
    synchronize_all(rank);
    rank.pipeline->keep_times(4, /*drained=*/true);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    const FakeGraph graph = end_capture(compute_stream);
    graph.replay();
    rank.step(4.0F, 4.0F);
    synchronize_all(rank);
    EXPECT_EQ(rank.pipeline->ledger().take_times().size(), 1U);
  });
}

// See Note [graph capture].
TEST_P(CudaSchedule, AWholeStepIsCapturedAndMayBeFollowedByOthers) {
  on_ranks(GetParam(), [](Rank& rank, int) {
    for (auto& unit : rank.units) {
      unit->keep_gradients();
    }
    for (int step = 0; step < 3; ++step) {
      rank.step(2.0F, 2.0F);
    }
    synchronize(compute_stream);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    const FakeGraph graph = end_capture(compute_stream);
    EXPECT_GT(graph.size(), 5 * 3U);
    for (int replay = 0; replay < 3; ++replay) {
      graph.replay();
    }
    rank.step(4.0F, 4.0F);  // events recorded in the capture do not block it
    synchronize(compute_stream);
    begin_capture(compute_stream);
    rank.step(5.0F, 5.0F);
    end_capture(compute_stream).replay();
  });
}

// The graph would not repeat the gathers that were issued before the capture.
TEST(CudaGraphs, ACaptureOfLessThanAStepIsRefused) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    rank.step(1.0F, 1.0F);
    const std::vector<int> calls = rank.forward();
    synchronize(compute_stream);
    begin_capture(compute_stream);
    try {
      rank.backward(calls, 1.0F);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("capture must contain whole steps"),
                std::string::npos)
          << error.what();
    }
    try {
      end_capture(compute_stream);
    } catch (const Error&) {
      // The step was interrupted.
    }
  });
}

TEST(CudaGraphs, ACaptureOfTheFirstStepSaysWhatToDo) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    begin_capture(compute_stream);
    try {
      rank.step(1.0F, 1.0F);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("a few whole steps before capturing one"),
                std::string::npos)
          << error.what();
    }
    try {
      end_capture(compute_stream);
    } catch (const Error&) {
      // The step was interrupted.
    }
  });
}

}  // namespace
}  // namespace fsdp::test
