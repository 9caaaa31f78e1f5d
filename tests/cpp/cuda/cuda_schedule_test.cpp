// The whole CUDA side without a GPU: the schedule on csrc/device/cuda_stream over threads
// (fake_cudart), with the kernels' bodies and csrc/comm/nccl over threads (fake_nccl). All streams
// run in parallel to the host. As in torch, memory comes from an allocator that knows only the
// compute stream. Freed memory is overwritten on that stream, so a missing wait gives wrong
// numbers.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "stream_ranks.h"

namespace fsdp::test {
namespace {

class CudaSchedule : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings, CudaSchedule,
                         ::testing::Values(Setting{1, kDirectBytes}, Setting{2, kDirectBytes},
                                           Setting{2, 0}, Setting{3, 300},
                                           Setting{2, kDirectBytes, 2}, Setting{2, 300, 4},
                                           Setting{2, 300, 2, 3}, Setting{3, 0, 4, 5},
                                           Setting{2, 300, 1, 0, 2}, Setting{2, 300, 2, 3, 3},
                                           Setting{1, 300, 1, 0, 2}, Setting{1, 300, 2, 0, 3},
                                           Setting{4, 300, 1, 0, 1, 2}, Setting{4, 0, 2, 3, 1, 2},
                                           Setting{4, kDirectBytes, 1, 0, 2, 2}),
                         [](const auto& info) {
                           return std::to_string(info.param.world_size) + "RanksDirectFrom" +
                                  std::to_string(info.param.direct_bytes) + "BucketsOf" +
                                  std::to_string(info.param.bucket_units) + "MessagesOf" +
                                  std::to_string(info.param.message_rows) + "Sets" +
                                  std::to_string(info.param.sets) +
                                  (info.param.group > 0 ? "InGroups" : "");
                         });

TEST_P(CudaSchedule, StepsReadWhatTheyShould) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 5; ++step) {
      rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
      rank.optimizer_step();
    }
  });
}

TEST_P(CudaSchedule, ResultsDoNotDependOnHowLateAStreamIs) {
  const Setting setting = GetParam();
  for (const std::string late : {"gather", "reduce", "compute", "all-reduce"}) {
    if (late == "all-reduce" && setting.sets == 1) {
      continue;
    }
    on_ranks(setting, [&](Rank& rank, int r) {
      for (int step = 0; step < 3; ++step) {
        Stream& stream = late == "compute"      ? rank.lanes->device->compute_stream()
                         : late == "all-reduce" ? rank.replicas->reduce.stream()
                                                : lane_named(*rank.lanes, late).stream();
        rank.lanes->device->delay(stream, std::chrono::milliseconds(15));
        rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
        rank.lanes->device->delay(stream, std::chrono::milliseconds(15));
        rank.optimizer_step();
      }
    });
  }
}

// See Note [gathers ahead of forward] in core/schedule/pipeline.h.
TEST_P(CudaSchedule, GathersAheadOfForwardReadWhatTheyShould) {
  const Setting setting = GetParam();
  for (const std::string late : {"gather", "compute"}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      Stream& stream =
          late == "gather" ? rank.lanes->gather.stream() : rank.lanes->device->compute_stream();
      for (int step = 0; step < 4; ++step) {
        rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
        rank.lanes->device->delay(stream, std::chrono::milliseconds(15));
        rank.optimizer_step();
        rank.pipeline->prefetch_next_forward();
        if (step == 2) {
          synchronize_all(rank);  // the gathers read the shards
          rank.optimizer_step();
        }
      }
    });
  }
}

TEST_P(CudaSchedule, ShardsThatChangeBetweenForwardAndBackwardAreReadAsTheyAre) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 3; ++step) {
      const std::vector<CallId> calls = rank.forward();
      rank.lanes->device->delay(rank.lanes->device->compute_stream(),
                                std::chrono::milliseconds(10));
      for (std::size_t i = 1; i < rank.units.size();
           ++i) {  // the root's parameters are gathered already
        rank.units[i]->change_shard();
      }
      rank.backward(calls, static_cast<float>(r + 1 + step));
      for (auto& unit : rank.units) {
        unit->read_gradients(mean_of(setting.ranks(), step));
        unit->zero_grad();
      }
    }
  });
}

TEST_P(CudaSchedule, TimesAreThoseOfTheStreamsAndNotOfTheHost) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    Ledger& ledger = rank.pipeline->ledger();
    rank.step(static_cast<float>(r + 1), mean_of(setting.ranks(), 0));
    rank.pipeline->ledger().keep_times(2, /*moments=*/100, /*drained=*/true);
    for (int step = 1; step < 5; ++step) {
      rank.lanes->device->delay(rank.lanes->device->compute_stream(), std::chrono::milliseconds(5));
      rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
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
    rank.step(static_cast<float>(r + 1), mean_of(setting.ranks(), 0));
    rank.pipeline->ledger().keep_times(1, /*moments=*/100, /*drained=*/true);
    rank.lanes->device->delay(rank.lanes->gather.stream(), std::chrono::milliseconds(10));
    rank.step(static_cast<float>(r + 2), mean_of(setting.ranks(), 1));
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
    rank.pipeline->ledger().keep_times(4, /*moments=*/100, /*drained=*/true);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    const FakeGraph graph = end_capture(compute_stream);
    graph.replay();
    rank.step(4.0F, 4.0F);
    synchronize_all(rank);
    EXPECT_EQ(rank.pipeline->ledger().take_times().size(), 1U);
  });
}

// - Units 2 and 3 are shared by fewer ranks than the others: Note [several meshes].

class CudaMeshes : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings, CudaMeshes,
                         ::testing::Values(Setting{4, 300, 1, 0, 1, 0, 2},
                                           Setting{4, kDirectBytes, 2, 0, 1, 0, 2},
                                           Setting{4, 0, 2, 3, 1, 0, 2},
                                           Setting{4, kDirectBytes, 1, 0, 1, 0, 1},
                                           Setting{4, 0, 2, 3, 1, 0, 1}),
                         [](const auto& info) {
                           return std::to_string(info.param.experts) + "RanksDirectFrom" +
                                  std::to_string(info.param.direct_bytes) + "BucketsOf" +
                                  std::to_string(info.param.bucket_units) + "MessagesOf" +
                                  std::to_string(info.param.message_rows);
                         });

// The mean of r + 1 over the ranks that share the unit.
float mean_of_unit(const Setting& setting, int unit, int rank) {
  const int size = setting.is_expert(unit) ? setting.experts : setting.world_size;
  return static_cast<float>(rank / size * size) + static_cast<float>(size + 1) / 2.0F;
}

TEST_P(CudaMeshes, GradientsAreThoseOfTheUnitsMeshHoweverLateAStreamIs) {
  const Setting setting = GetParam();
  for (const std::string late : {"gather", "reduce", "compute"}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      Device& device = *rank.lanes->device;
      Stream& stream =
          late == "compute" ? device.compute_stream() : lane_named(*rank.lanes, late).stream();
      for (int step = 0; step < 2; ++step) {
        for (const float times : {1.0F, 2.0F}) {  // the second backward adds to the first one's
          device.delay(stream, std::chrono::milliseconds(10));
          rank.backward(rank.forward(), static_cast<float>(r + 1));
          for (int i = 0; i < static_cast<int>(rank.units.size()); ++i) {
            rank.units[static_cast<std::size_t>(i)]->read_gradients(times *
                                                                    mean_of_unit(setting, i, r));
          }
        }
        for (auto& unit : rank.units) {
          unit->zero_grad();
        }
        rank.optimizer_step();
      }
    });
  }
}

// - Reductions

// See Note [packing ahead]. A gate keeps the reduce stream, and all of its messages, from starting.
TEST(CudaReductions, TheNextBucketIsPackedWhileOneIsOnTheWire) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int r) {
    rank.step(static_cast<float>(r + 1), mean_of(2, 0));
    const auto bucket = [&rank](int unit) -> const Bucket& {
      return *rank.pipeline->unit(unit).bucket;
    };
    std::promise<void> gate;
    enqueue(rank.lanes->reduce.stream().native_handle(),
            [opened = gate.get_future().share()] { opened.wait(); });
    rank.backward(rank.forward(), static_cast<float>(r + 2), [&](int unit) {
      if (unit != 2) {
        return;
      }
      bucket(4).reduction.packed().synchronize(kTimeout, "the packing of the first bucket");
      bucket(3).reduction.packed().synchronize(kTimeout, "the packing of the second bucket");
      EXPECT_FALSE(bucket(4).reduction.reduced().query());
      EXPECT_FALSE(bucket(2).reduction.packed().query());  // the first bucket still uses its input
      gate.set_value();
      bucket(2).reduction.packed().synchronize(kTimeout, "the packing of the third bucket");
    });
    for (auto& unit : rank.units) {
      unit->read_gradients(mean_of(2, 1));
      unit->zero_grad();
    }
    const std::size_t message = bucket(1).reduction.input_bytes();
    EXPECT_EQ(rank.pipeline->reducer().buffer_bytes(),
              2 * align_up(message, kRegionAlignment) + bucket(1).buffers.reduce_output);
  });
}

// A message that is late has not read its input when the buckets behind it are packed.
TEST(CudaReductions, AnInputIsNotPackedAgainBeforeItsMessageHasReadIt) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int r) {
    for (int step = 0; step < 2; ++step) {
      rank.backward(rank.forward(), static_cast<float>(r + 1 + step), [&rank](int) {
        rank.lanes->device->delay(rank.lanes->reduce.stream(), std::chrono::milliseconds(5));
      });
      for (auto& unit : rank.units) {
        unit->read_gradients(mean_of(2, step));
        unit->zero_grad();
      }
    }
  });
}

// See Note [gradients of several streams]. The first gradient of a unit, or its last one, which
// starts the reduction, comes from another stream that is late. Where the packing is late, both
// streams reuse the memory of gradients as soon as they may.
TEST(CudaReductions, GradientsMayArriveOnSeveralStreams) {
  for (const std::size_t param : {std::size_t{0}, kParams - 1}) {
    for (const std::string late : {"side", "compute", "reduce"}) {
      on_ranks({2, kDirectBytes}, [&](Rank& rank, int r) {
        rank.make_on_side_stream(param);
        Device& device = *rank.lanes->device;
        const auto delay_late = [&](int) {
          const OnStream on(late == "side" ? rank.side_stream : compute_stream);
          device.delay(late == "reduce" ? rank.lanes->reduce.before() : device.compute_stream(),
                       std::chrono::milliseconds(3));
        };
        rank.step(static_cast<float>(r + 1), mean_of(2, 0));
        for (int step = 1; step < 3; ++step) {
          rank.backward(rank.forward(), static_cast<float>(r + 1 + step), delay_late);
          for (auto& unit : rank.units) {
            unit->read_gradients(mean_of(2, step));
            unit->zero_grad();
          }
        }
        synchronize(rank.side_stream);
      });
    }
  }
}

// See Note [gradient lifetime]. Where the packing is late, a missing wait overwrites gradients that
// it still reads.
void expect_live_gradients(Setting setting, std::size_t units, std::size_t large_units) {
  for (const bool reduces : {true, false}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      const auto delay_packing = [&rank](int) {
        rank.lanes->device->delay(rank.lanes->reduce.before(), std::chrono::milliseconds(3));
      };
      rank.step(static_cast<float>(r + 1), mean_of(2, 0));
      if (!reduces) {
        for (int i = 0; i < static_cast<int>(rank.units.size()); ++i) {
          set_requires_gradient_sync(*rank.pipeline, i, false);
        }
        rank.backward(rank.forward(), 3.0F, delay_packing);  // it allocates
      }
      live_gradients.most = 0;
      rank.backward(rank.forward(), static_cast<float>(r + 2), delay_packing);
      std::size_t unit_bytes = 0;
      for (const std::int64_t rows : kRows) {
        unit_bytes += static_cast<std::size_t>(rows * kColumns) * sizeof(float);
      }
      const auto times = static_cast<std::size_t>(setting.times_rows);
      EXPECT_EQ(live_gradients.most, (units + times * large_units) * unit_bytes);
      EXPECT_EQ(live_gradients.bytes, 0U);
      for (int i = 0; !reduces && i < static_cast<int>(rank.units.size()); ++i) {
        set_requires_gradient_sync(*rank.pipeline, i, true);
      }
      if (!reduces) {
        rank.backward(rank.forward(), 1.0F, delay_packing);
      }
      for (auto& unit : rank.units) {
        unit->read_gradients(mean_of(2, 1) + (reduces ? 0.0F : 4.0F));
        unit->zero_grad();
      }
    });
  }
}

TEST(CudaReductions, GradientsOfOneBucketAreInFlightWhileThoseOfTheNextArrive) {
  expect_live_gradients({2, kDirectBytes}, 2, 0);
}

// A large bucket comes first, between others, last, or around all others.
TEST(CudaReductions, GradientsOfALargeBucketAreAliveAlone) {
  for (const int large : {4, 2, 1, 0}) {
    SCOPED_TRACE(large);
    Setting setting{2, kDirectBytes};
    setting.large = large;
    expect_live_gradients(setting, 0, 1);
    setting.message_rows = 9;  // in pieces
    expect_live_gradients(setting, 0, 1);
  }
}

// See Note [the reduce output]. The second backward adds to gradients, so it cannot reduce in
// place. A finish or an all-reduce that is late has not read a half when other messages come.
TEST(CudaReductions, AHalfOfTheOutputIsNotWrittenAgainBeforeItIsFinished) {
  for (const Setting setting :
       {Setting{2, 300, 1, 3}, Setting{2, 300, 2, 5}, Setting{2, 300, 1, 3, 2},
        Setting{2, kDirectBytes, 1, 0, 2}, Setting{1, 300, 1, 0, 2}}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      rank.step(static_cast<float>(r + 1), mean_of(setting.ranks(), 0));
      Stream& finishes =
          rank.replicas != nullptr ? rank.replicas->reduce.stream() : rank.lanes->reduce.after();
      for (int backward = 0; backward < 3; ++backward) {
        const std::vector<CallId> calls = rank.forward();
        rank.lanes->device->delay(finishes, std::chrono::milliseconds(5));
        rank.backward(calls, static_cast<float>((r + 1) << backward), [&](int) {
          rank.lanes->device->delay(finishes, std::chrono::milliseconds(2));
        });
      }
      for (auto& unit : rank.units) {
        unit->read_gradients(7 * mean_of(setting.ranks(), 0));
      }
    });
  }
}

// Doubles what a unit's reduction gives, and notes how much that is.
class Doubling final : public UserCollective {
 public:
  void issue(Stream& stream, const HookTensors& tensors) override {
    numels.push_back(tensors.numel);
    enqueue(stream.native_handle(),
            [data = static_cast<float*>(tensors.output), numel = tensors.numel] {
              for (std::size_t i = 0; i < numel; ++i) {
                data[i] *= 2;
              }
            });
  }
  void check() override {}
  void reset() override {}

  std::vector<std::size_t> numels;
};

// Steps a unit as an attached optimizer does, late.
class Stepping final : public UnitUpdate {
 public:
  Stepping(Rank& rank, StreamUnit& unit, float expected)
      : rank_(rank), unit_(unit), expected_(expected) {}

  void run(Stream* stream) override {
    rank_.lanes->device->delay(*stream, std::chrono::milliseconds(3));
    const OnStream on(static_cast<cudaStream_t>(stream->native_handle()));
    unit_.read_gradients(expected_);
    unit_.change_shard();
    unit_.zero_grad();
    runs += 1;
  }

  int runs = 0;

 private:
  Rank& rank_;
  StreamUnit& unit_;
  float expected_;
};

// Note [updates in backward]
TEST(CudaReductions, UpdatesInBackwardAreOrderedWithGathersAndReductions) {
  for (const Setting setting : {Setting{2, 300, 1}, Setting{2, 300, 2, 5}, Setting{2, 300, 1, 3, 2},
                                Setting{2, kDirectBytes, 1, 0, 2}, Setting{1, 300, 1, 0, 2}}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      const float mean = mean_of(setting.ranks(), 0);
      std::vector<std::shared_ptr<Stepping>> updates;
      for (std::size_t i = 0; i < rank.units.size(); ++i) {
        updates.push_back(std::make_shared<Stepping>(rank, *rank.units[i], mean));
        change_settings(*rank.pipeline, static_cast<int>(i),
                        [&](UnitSettings& settings) { settings.update = updates.back(); });
      }
      for (int step = 0; step < 4; ++step) {
        rank.backward(rank.forward(), static_cast<float>(r + 1), [&](int) {
          const auto& buckets = rank.pipeline->units().buckets();
          const auto with_gradients =
              std::count_if(buckets.begin(), buckets.end(),
                            [](const auto& bucket) { return !bucket->has_lent_gradients(); });
          EXPECT_LE(step == 0 ? 0 : with_gradients, 2);
        });
      }
      for (const auto& update : updates) {
        EXPECT_EQ(update->runs, 4);
      }
      EXPECT_THROW(
          {
            const std::vector<CallId> calls = rank.forward();
            rank.backward(calls, static_cast<float>(r + 1), [&](int unit) {
              if (unit == 1) {  // more of a gradient that was reduced
                rank.units[3]->add_gradient(0, 1.0F);
                rank.pipeline->backward().gradient_arrived(3, 0);
              }
            });
          },
          Error);
    });
  }
}

// The hook is set between a forward and its backward: first for that backward's output, and in the
// next forward ranks plan memory for it. Then it is taken away again.
TEST(CudaReductions, AHookSeesItsWholeUnitHoweverMemoryWasPlanned) {
  for (Setting setting : {Setting{2, 300, 1, 20}, Setting{2, 300, 2, 3}, Setting{2, 300, 1, 3, 2},
                          Setting{2, 300, 1, 0, 2}}) {
    setting.large = 2;  // its whole output does not fit into that of two messages
    on_ranks(setting, [&](Rank& rank, int r) {
      const auto doubling = std::make_shared<Doubling>();
      const auto set_hook = [&](const std::shared_ptr<UserCollective>& hook) {
        change_settings(*rank.pipeline, 2, [&](UnitSettings& settings) {
          settings.is_unmergeable = settings.reads_whole_output = hook != nullptr;
          settings.reduce_hook = hook;
        });
      };
      const auto buffers = [&rank] { return rank.pipeline->reducer().buffer_bytes(); };
      const float mean = mean_of(setting.ranks(), 0);
      rank.step(static_cast<float>(r + 1), mean);
      Stream& finishes =
          setting.sets > 1 ? rank.replicas->reduce.stream() : rank.lanes->reduce.after();
      const auto add = [&](const std::vector<CallId>& calls) {
        rank.backward(calls, static_cast<float>(r + 1), [&](int) {
          rank.lanes->device->delay(finishes, std::chrono::milliseconds(2));
        });
      };
      add(rank.forward());
      add(rank.forward());
      const std::size_t before = buffers();
      const std::vector<CallId> calls = rank.forward();
      set_hook(doubling);
      add(calls);
      const auto numel = static_cast<std::size_t>(rank.pipeline->unit(2).layout.grad_numel());
      const bool is_cut = rank.pipeline->unit(2).bucket->reduction.is_in_pieces();
      EXPECT_EQ(buffers() > before, is_cut);
      add(rank.forward());
      EXPECT_EQ(doubling->numels, std::vector<std::size_t>(2, numel));
      EXPECT_EQ(buffers() > before, is_cut);
      set_hook(nullptr);
      add(rank.forward());
      if (setting.bucket_units == 1) {
        EXPECT_EQ(buffers(), before);
      }
      for (std::size_t i = 0; i < rank.units.size(); ++i) {
        rank.units[i]->read_gradients(mean * (i == 2 ? 7.0F : 5.0F));
      }
    });
  }
}

// A message that is late reads what earlier backwards have accumulated, and the next backward
// accumulates again. The compute stream waits for the last backward's reductions alone.
TEST(CudaReductions, AccumulatedGradientsAreNotPackedAgainBeforeTheirMessageHasReadThem) {
  const auto train = [](Rank& rank, int r, int count) {
    float sum = 0.0F;
    for (const bool reduces : {false, true, false, true, true}) {
      for (const auto& bucket : rank.pipeline->units().buckets()) {
        for (const Unit* unit : bucket->units) {
          set_requires_gradient_sync(*rank.pipeline, unit->number, reduces);
        }
      }
      const float pass = sum + 1;  // each backward has other gradients
      sum += pass;
      rank.pipeline->options().is_last_backward = sum > 15;
      Lanes& late = rank.replicas != nullptr ? *rank.replicas : *rank.lanes;
      late.device->delay(late.reduce.stream(), std::chrono::milliseconds(5));
      rank.backward(rank.forward(), pass * static_cast<float>(r + 1));
    }
    for (auto& unit : rank.units) {
      unit->read_gradients(sum * mean_of(count, 0));
    }
  };
  for (const Setting setting :
       {Setting{2, kDirectBytes}, Setting{2, kDirectBytes, 1, 0, 2}, Setting{1, 300, 1, 0, 2}}) {
    on_ranks(setting, [&](Rank& rank, int r) { train(rank, r, setting.ranks()); });
  }
}

// See Note [lent gradients]. A unit fills new memory with NaN.
TEST(CudaReductions, GradientsLendTheirMemoryWhileThereAreNone) {
  const auto count_lent = [](Rank& rank) {
    return std::count_if(rank.units.begin(), rank.units.end(),
                         [](const auto& unit) { return unit->flat_gradient() == nullptr; });
  };
  for (const Setting setting : {Setting{2, kDirectBytes}, Setting{2, kDirectBytes, 2, 3},
                                Setting{2, 300, 1, 0, 2}, Setting{1, 300}}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      const auto all = static_cast<std::ptrdiff_t>(rank.units.size());
      const auto pass = [&](int step) {
        const std::vector<CallId> calls = rank.forward();
        const std::ptrdiff_t lent = count_lent(rank);
        rank.backward(calls, static_cast<float>(r + 1 + step));
        EXPECT_EQ(count_lent(rank), 0);
        return lent;
      };
      const auto end_step = [&](int step) {
        for (auto& unit : rank.units) {
          unit->read_gradients(mean_of(setting.ranks(), step));
          unit->zero_grad();
        }
      };
      EXPECT_EQ(pass(0), all);
      end_step(0);
      EXPECT_EQ(pass(1), all);  // in the buckets that the first step has recorded
      end_step(1);
      rank.units[1]->is_gradient_held = true;
      const std::ptrdiff_t beside = pass(2);
      EXPECT_EQ(beside,
                all - static_cast<std::ptrdiff_t>(rank.pipeline->unit(1).bucket->units.size()));
      end_step(2);
      rank.units[1]->is_gradient_held = false;
      EXPECT_EQ(pass(3), all);
      EXPECT_EQ(pass(4), 0);  // gradients are added to those in .grad
      for (auto& unit : rank.units) {
        unit->read_gradients(mean_of(setting.ranks(), 3) + mean_of(setting.ranks(), 4));
        unit->zero_grad();
      }
      rank.pipeline->options().is_last_backward = false;
      pass(5);
      for (auto& unit : rank.units) {
        unit->zero_grad();
      }
      EXPECT_EQ(pass(6), 0);  // the compute stream has not waited for what writes them
    });
  }
}

// See Note [shards and gradients in windows]. Without a cast, each gather reads the flat shard, and
// each reduction writes the flat gradient.
TEST(CudaWindows, GathersAndReductionsUseWindowsAlone) {
  const auto train = [](int bucket_units, int gather_policy) {
    FakeNccl& nccl = fake();
    nccl.registered_gathers = nccl.registered_reductions = nccl.plain_reductions = 0;
    nccl.copied_gathers = nccl.switch_gathers = nccl.ring_gathers = 0;
    std::atomic<std::uint64_t> gathers{0};
    std::atomic<std::uint64_t> reductions{0};
    Setting setting = by_switch({2, kDirectBytes, bucket_units});
    setting.gather_policy = gather_policy;
    on_ranks(setting, [&](Rank& rank, int r) {
      for (int step = 0; step < 3; ++step) {
        rank.step(static_cast<float>(r + 1 + step), mean_of(2, step));
        rank.optimizer_step();
      }
      gathers += rank.pipeline->ledger().counters().all_gathers;
      reductions += rank.pipeline->ledger().counters().reduce_scatters;
    });
    EXPECT_EQ(static_cast<std::uint64_t>(nccl.registered_gathers), gathers);
    EXPECT_EQ(static_cast<std::uint64_t>(nccl.registered_reductions), reductions);
    EXPECT_EQ(nccl.plain_reductions, 0);
    const auto all_with = [&](int policy) {
      return gather_policy == policy ? nccl.registered_gathers.load() : 0;
    };
    EXPECT_EQ(nccl.copied_gathers, all_with(nccl::kZeroCtas));
    EXPECT_EQ(nccl.switch_gathers, all_with(nccl::kEfficiencyPolicy));
    EXPECT_EQ(nccl.ring_gathers, 0);
    EXPECT_EQ(nccl.overlapping_windows, 0);
    EXPECT_EQ(nccl.registered_buffers, 0);
    EXPECT_EQ(nccl.live_buffers, 0);
  };
  for (const int bucket_units : {1, 2}) {
    for (const int policy : {nccl::kUndefined, nccl::kEfficiencyPolicy, nccl::kZeroCtas}) {
      train(bucket_units, policy);
    }
  }
}

// See Note [shards and gradients in windows]. Of these tensors two fit into a block, the third does
// not, and the fourth is larger than a block.
TEST(CudaWindows, SeveralTensorsShareABlockOfBoundedSize) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  on_ranks({2, kDirectBytes}, [&](Rank& rank, int) {
    Lane& lane = rank.lanes->gather;
    const int before = lane.registered_buffers();
    std::vector<std::shared_ptr<void>> moved;
    std::vector<Lane::Movable> tensors;
    for (const std::size_t bytes : {300 * kMiB - 4, 200 * kMiB, 100 * kMiB, 600 * kMiB}) {
      tensors.push_back({nullptr, bytes, [&moved](auto memory) { moved.push_back(memory); }});
    }
    lane.place_in_windows(tensors, BufferUse::Shard);
    ASSERT_EQ(moved.size(), 4U);
    EXPECT_EQ(lane.registered_buffers(), before + 3);
    const auto address = [&moved](std::size_t i) { return static_cast<char*>(moved[i].get()); };
    EXPECT_EQ(address(1) - address(0), static_cast<std::ptrdiff_t>(300 * kMiB));
    for (std::size_t i = 0; i < 4; ++i) {
      tensors[i].memory = address(i);
      EXPECT_TRUE(lane.is_registered(address(i) + tensors[i].bytes - 1));
    }
    lane.place_in_windows(tensors, BufferUse::Shard);
    EXPECT_EQ(moved.size(), 4U);  // all are in blocks already

    const std::vector<Lane::Movable> third = {tensors[2]};
    moved[0].reset();
    lane.place_in_windows(third, BufferUse::Shard);
    EXPECT_EQ(lane.registered_buffers(), before + 3);  // its block has another tensor
    moved[1].reset();
    moved[3].reset();
    lane.place_in_windows(third, BufferUse::Shard);
    EXPECT_EQ(lane.registered_buffers(), before + 1);
  });
}

// Over sockets, for example. Reductions write the flat gradients as they do with windows.
TEST(CudaWindows, NothingIsCopiedForWindowsThatNcclCannotRegister) {
  std::uint64_t copied[2] = {};
  for (const bool fails : {false, true}) {
    fake().register_result = fails ? 3 : 0;
    on_ranks(by_switch({2, kDirectBytes}), [&](Rank& rank, int r) {
      for (int step = 0; step < 3; ++step) {
        rank.step(static_cast<float>(r + 1 + step), mean_of(2, step));
      }
      if (r == 0) {
        copied[fails ? 1 : 0] = rank.pipeline->ledger().counters().copied_bytes;
        const Bucket& bucket = *rank.pipeline->unit(2).bucket;
        EXPECT_EQ(rank.lanes->reduce.is_registered(bucket.flat_gradient()), !fails);
      }
    });
  }
  fake().register_result = 0;
  EXPECT_GT(copied[0], 0U);
  EXPECT_EQ(copied[0], copied[1]);
}

// One rank's user holds the gradients, so that rank has new memory for them. It must not be the
// only rank that reduces into memory that is no window. Planning memory again gives all of them
// windows.
TEST(CudaWindows, AGradientThatIsHeldOnOneRankIsReducedThroughAWindow) {
  FakeNccl& nccl = fake();
  nccl.plain_reductions = 0;
  on_ranks(by_switch({2, kDirectBytes}), [&](Rank& rank, int r) {
    const auto in_window = [&rank](StreamUnit& unit) {
      return rank.lanes->reduce.is_registered(unit.flat_gradient());
    };
    StreamUnit& unit = *rank.units[2];
    rank.step(static_cast<float>(r + 1), mean_of(2, 0));
    EXPECT_TRUE(in_window(unit));
    unit.is_gradient_held = r == 0;
    rank.step(static_cast<float>(r + 2), mean_of(2, 1));
    EXPECT_EQ(in_window(unit), r != 0);
    unit.is_gradient_held = false;
    rank.step(static_cast<float>(r + 3), mean_of(2, 2));
    rank.pipeline->options().prefetch_depth = 2;
    rank.step(static_cast<float>(r + 4), mean_of(2, 3));
    EXPECT_TRUE(in_window(unit));
  });
  EXPECT_EQ(nccl.plain_reductions, 0);
}

// Before a capture, a few steps have to run: Note [graph capture].
void step_before_capture(Rank& rank) {
  for (auto& unit : rank.units) {
    unit->keep_gradients();
  }
  for (int step = 0; step < 3; ++step) {
    rank.step(2.0F, 2.0F);
  }
}

TEST_P(CudaSchedule, AWholeStepIsCapturedAndMayBeFollowedByOthers) {
  on_ranks(GetParam(), [](Rank& rank, int) {
    step_before_capture(rank);
    rank.pipeline->prefetch_next_forward();  // the graph gathers by itself
    synchronize_all(rank);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    const FakeGraph graph = end_capture(compute_stream);
    EXPECT_GT(graph.size(), 5 * 3U);
    for (int replay = 0; replay < 3; ++replay) {
      rank.pipeline->prefetch_next_forward();  // does nothing: replays use the slots
      graph.replay();
    }
    rank.step(4.0F, 4.0F);  // events recorded in the capture do not block it
    synchronize(compute_stream);
    begin_capture(compute_stream);
    rank.step(5.0F, 5.0F);
    end_capture(compute_stream).replay();
  });
}

// A slot that an evaluation keeps: Note [after an evaluation] in core/gather/unit_gather.h.
void keep_slots_after_evaluation(Rank& rank) {
  change_settings(*rank.pipeline, 0,
                  [](UnitSettings& settings) { settings.keeps_slot_after_evaluation = true; });
}

TEST(CudaGraphs, ACapturedStepGathersUnitsThatWereUnsharded) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    keep_slots_after_evaluation(rank);
    step_before_capture(rank);
    rank.evaluate();
    rank.pipeline->unshard(1);
    rank.pipeline->wait_for_unshard(1);
    synchronize_all(rank);
    const std::uint64_t before = rank.pipeline->ledger().counters().all_gathers;
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    end_capture(compute_stream).replay();
    // All units in forward, and all but the root in backward.
    EXPECT_EQ(rank.pipeline->ledger().counters().all_gathers - before, 5U + 4U);
  });
}

// A captured optimizer changes shards without a new version.
TEST(CudaGraphs, AnEvaluationAfterAReplayReadsTheNewShards) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    keep_slots_after_evaluation(rank);
    step_before_capture(rank);
    synchronize_all(rank);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    end_capture(compute_stream).replay();
    for (int step = 0; step < 2; ++step) {
      rank.evaluate();
      for (auto& unit : rank.units) {
        unit->change_shard_unseen();
      }
    }
  });
}

// A replay waits for nothing else. The exchange at the end of backward is a collective of the lane
// that the step itself does not wait for.
TEST(CudaGraphs, AStepAfterACaptureEndsOnTheComputeStream) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    step_before_capture(rank);
    synchronize_all(rank);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    end_capture(compute_stream);
    rank.step(4.0F, 4.0F);
    EXPECT_TRUE(waits_for_all_of(compute_stream, rank.lanes->gather.stream().native_handle()));
  });
}

// The graph would not repeat the gathers that were issued before the capture.
TEST(CudaGraphs, ACaptureOfLessThanAStepIsRefused) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    rank.step(1.0F, 1.0F);
    const std::vector<CallId> calls = rank.forward();
    synchronize_all(rank);
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

// The replays use the slots, the staging and the reduce input.
TEST(CudaGraphs, ACapturedStepKeepsItsBuffers) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    step_before_capture(rank);
    synchronize_all(rank);
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    const FakeGraph graph = end_capture(compute_stream);
    rank.pipeline->options().prefetch_depth = 2;
    try {
      rank.step(3.0F, 3.0F);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("its replays use the buffers"), std::string::npos)
          << error.what();
    }
    graph.replay();
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
