// Memory that is planned again while streams are late, which still use the ring of the plan before.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "stream_ranks.h"

namespace fsdp::test {
namespace {

// The allocator orders the ring by the stream on which it was planned, and not by another one that
// has become the compute stream.
TEST(CudaPlan, TheRingIsFreedAfterItsReaders) {
  fake().register_result = 3;
  on_ranks({2, 300}, [](Rank& rank, int) {
    rank.lanes->gather.allocate(64, BufferUse::Output);  // fails to register, so no other tries
    for (int step = 0; step < 2; ++step) {
      rank.step(1.0F, 1.0F);
    }
    synchronize(compute_stream);
    rank.side_stream = new_stream("another");
    const OnStream on(rank.side_stream);
    rank.forward([&rank](int unit) {
      if (unit == 4) {
        rank.lanes->device->delay(rank.lanes->device->compute_stream(),
                                  std::chrono::milliseconds(20));
      }
    });
    rank.pipeline->options().prefetch_depth = 2;
    rank.forward();
    synchronize(compute_stream);
  });
  fake().register_result = 0;
}

// Runs an evaluation on another stream, whose last kernels are late. The stream that frees the
// slots does not wait for them. `keeps_slot`: the root keeps its slot.
void evaluate_late(Rank& rank, bool keeps_slot) {
  rank.lanes->gather.allocate(64, BufferUse::Output);  // fails to register, so no other tries
  rank.pipeline->gatherer().set_poison_released_slots(false);
  change_settings(*rank.pipeline, 0, [=](UnitSettings& settings) {
    settings.keeps_slot_after_evaluation = keeps_slot;
  });
  rank.step(1.0F, 1.0F);
  rank.step(1.0F, 1.0F);
  synchronize(compute_stream);
  rank.side_stream = new_stream("another");
  const OnStream on(rank.side_stream);
  const auto be_late = [&rank] {
    Device& device = *rank.lanes->device;
    device.delay(device.compute_stream(), std::chrono::milliseconds(20));
  };
  rank.forward(
      [&](int unit) {
        if (unit == 4) {
          be_late();
          rank.units[0]->read_parameters();
        }
      },
      /*with_gradient=*/false);
  if (keeps_slot) {
    be_late();
    rank.units[0]->read_parameters();
  }
}

TEST(CudaPlan, SlotsAreFreedAfterReadersOfAnotherStream) {
  fake().register_result = 3;
  for (const bool keeps_slot : {true, false}) {
    for (const bool forms_buckets : {true, false}) {
      on_ranks({2, 300}, [=](Rank& rank, int) {
        evaluate_late(rank, keeps_slot);
        rank.pipeline->options().prefetch_depth = 2;
        for (int unit = 1; forms_buckets && unit < 5; ++unit) {
          change_settings(*rank.pipeline, unit,
                          [](UnitSettings& settings) { settings.bucket_bytes *= 2; });
        }
        rank.forward();
        synchronize(rank.side_stream);
      });
    }
  }
  fake().register_result = 0;
}

TEST(CudaPlan, SlotsOfADeletedModelAreFreedAfterReadersOfAnotherStream) {
  fake().register_result = 3;
  for (const bool keeps_slot : {true, false}) {
    on_ranks({2, 300}, [=](Rank& rank, int) {
      evaluate_late(rank, keeps_slot);
      rank.pipeline.reset();
      synchronize(rank.side_stream);
    });
  }
  fake().register_result = 0;
}

// The all-reduce over replicas of a backward on another stream is late.
TEST(CudaPlan, BucketsAreFormedAfterTheReductionsOfAnotherStream) {
  on_ranks(Setting{2, 300, 2, 0, 2}, [](Rank& rank, int) {
    rank.step(1.0F, 1.0F);
    rank.step(1.0F, 1.0F);
    synchronize_all(rank);
    rank.side_stream = new_stream("another");
    {
      const OnStream on(rank.side_stream);
      rank.lanes->device->delay(rank.replicas->reduce.stream(), std::chrono::milliseconds(20));
      rank.backward(rank.forward(), 1.0F);
    }
    for (int unit = 1; unit < 5; ++unit) {
      change_settings(*rank.pipeline, unit,
                      [](UnitSettings& settings) { settings.bucket_bytes *= 2; });
    }
    rank.forward();
    for (auto& unit : rank.units) {
      unit->read_gradients(1.0F);
    }
    synchronize(rank.side_stream);
  });
}

// The marks of NaN are copied on the compute stream, and the old ones freed on another one.
TEST(CudaPlan, MarksOfNanAreFreedAfterTheyAreCopied) {
  on_ranks({2, 300}, [](Rank& rank, int) {
    rank.step(1.0F, 1.0F);
    synchronize(compute_stream);
    rank.side_stream = new_stream("another");
    const OnStream on(rank.side_stream);
    rank.pipeline->options().prefetch_depth = 2;
    allocation_delay = std::chrono::milliseconds(20);  // of the new marks
    rank.forward();
    allocation_delay = std::chrono::milliseconds(0);
    const std::vector<char> found = rank.pipeline->reducer().nonfinite_gradients().find(
        rank.pipeline->units().buckets(), rank.units.size());
    EXPECT_EQ(found, std::vector<char>(rank.units.size(), 0));
  });
}

}  // namespace
}  // namespace fsdp::test
