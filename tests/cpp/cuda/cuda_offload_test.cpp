// Units whose shards and gradients are in the host's memory, where no event orders what reads and
// writes them: Note [offloaded units] in core/memory/layout.h. As in cuda_schedule_test.cpp,
// streams run in parallel to the host. Here the optimizer runs on the host.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "stream_ranks.h"

namespace fsdp::test {
namespace {

class CudaOffload : public ::testing::TestWithParam<Setting> {};

Setting offloaded(Setting setting) {
  setting.is_offloaded = true;
  return setting;
}

// Shards are cast into the slot or the staging buffer.
Setting in_place(Setting setting) {
  setting.gathers_in_place = true;
  return offloaded(setting);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, CudaOffload,
    ::testing::Values(offloaded({1, kDirectBytes}), offloaded({2, kDirectBytes}), offloaded({2, 0}),
                      offloaded({2, 300, 4}), offloaded({3, 0, 4, 5}), offloaded({2, 300, 2, 3, 2}),
                      offloaded({1, 300, 1, 0, 2}), offloaded({4, 0, 2, 3, 1, 2}),
                      in_place({2, kDirectBytes}), in_place({3, 0, 4, 5}),
                      in_place({2, 300, 2, 3, 2}), in_place({4, 0, 2, 3, 1, 2}),
                      in_place({2, 0, 1, 20})));

std::vector<Stream*> streams_of(Rank& rank) {
  std::vector<Stream*> streams{&rank.lanes->device->compute_stream(), &rank.lanes->gather.stream(),
                               &rank.lanes->reduce.stream()};
  if (rank.replicas != nullptr) {
    streams.push_back(&rank.replicas->reduce.stream());
  }
  return streams;
}

TEST_P(CudaOffload, AnOptimizerOnTheHostStepsAsOneOnTheDevice) {
  const Setting setting = GetParam();
  for (const std::size_t late : {0, 1, 2, 3}) {
    on_ranks(setting, [&](Rank& rank, int r) {
      const std::vector<Stream*> streams = streams_of(rank);
      for (int step = 0; step < 3 && late < streams.size(); ++step) {
        rank.lanes->device->delay(*streams[late], std::chrono::milliseconds(10));
        rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
        rank.optimizer_step();
      }
      EXPECT_EQ(static_cast<KernelPacker&>(*rank.lanes->packer).casts_in_device, 0);
    });
  }
}

// A kernel that is queued still reads a slot that backward has released.
TEST_P(CudaOffload, ACastIntoASlotFollowsItsReaders) {
  on_ranks(GetParam(), [](Rank& rank, int r) {
    const auto delay_compute = [&](int) {
      rank.lanes->device->delay(rank.lanes->device->compute_stream(), std::chrono::milliseconds(3));
    };
    for (int step = 0; step < 2; ++step) {
      rank.backward(rank.forward(), static_cast<float>(r + 1 + step), delay_compute);
      for (auto& unit : rank.units) {
        unit->zero_grad();
      }
    }
  });
}

TEST(CudaInputs, AreKeptOnNoRankIfOneRankKeepsNone) {
  Setting setting = offloaded({2, 300, 2, 3});
  setting.only_first_in_place = true;
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 3; ++step) {
      rank.pipeline->options().prefetch_depth = 1 + step;  // memory is planned again
      rank.step(static_cast<float>(r + 1 + step), mean_of(setting.ranks(), step));
      rank.optimizer_step();
      EXPECT_FALSE(rank.pipeline->gatherer().keeps_inputs());
    }
  });
}

TEST_P(CudaOffload, TheHostMayChangeShardsAfterAForwardWithoutBackward) {
  on_ranks(GetParam(), [](Rank& rank, int) {
    for (int step = 0; step < 3; ++step) {
      rank.lanes->device->delay(rank.lanes->gather.stream(), std::chrono::milliseconds(10));
      rank.forward();
      rank.optimizer_step();
    }
  });
}

TEST_P(CudaOffload, TheHostMayChangeShardsAfterTheUserHasUnshardedThem) {
  on_ranks(GetParam(), [&](Rank& rank, int r) {
    rank.step(static_cast<float>(r + 1), mean_of(GetParam().ranks(), 0));
    for (const bool waits : {true, false}) {
      rank.lanes->device->delay(rank.lanes->gather.stream(), std::chrono::milliseconds(5));
      for (int i = 0; i < 5; ++i) {
        rank.pipeline->unshard(i);
        if (waits || r > 0) {
          rank.pipeline->wait_for_unshard(i);
          rank.units[static_cast<std::size_t>(i)]->read_parameters();
        }
        if (waits) {
          rank.optimizer_step();
        }
        rank.pipeline->reshard(i);
      }
      rank.optimizer_step();
    }
  });
}

TEST_P(CudaOffload, GradientsAreAddedToThoseOfTheBackwardBefore) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int r) {
    for (int step = 0; step < 2; ++step) {
      rank.backward(rank.forward(), static_cast<float>(r + 1 + step));
    }
    for (auto& unit : rank.units) {
      unit->read_gradients(mean_of(setting.ranks(), 0) + mean_of(setting.ranks(), 1));
    }
  });
}

TEST(CudaOffloadCapture, IsRefused) {
  on_ranks(offloaded({2, kDirectBytes}), [](Rank& rank, int) {
    for (auto& unit : rank.units) {
      unit->keep_gradients();
    }
    for (int step = 0; step < 3; ++step) {
      rank.step(2.0F, 2.0F);
    }
    synchronize(compute_stream);
    begin_capture(compute_stream);
    try {
      rank.forward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("without CPUOffloadPolicy"), std::string::npos)
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
