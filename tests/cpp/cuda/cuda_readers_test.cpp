// Units that several streams of the user read: Note [slot lifetime] in core/memory/buffer_ring.h.
// As in cuda_schedule_test.cpp, a missing wait gives wrong numbers.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "stream_ranks.h"

namespace fsdp::test {
namespace {

constexpr std::chrono::milliseconds kLate{20};

// The body runs on a stream that waits for nothing by itself.
template <typename Body>
void on_another_stream(Rank& rank, const Body& body) {
  if (rank.side_stream == nullptr) {
    rank.side_stream = new_stream("another");
  }
  const OnStream on(rank.side_stream);
  body();
}

void prepare(Rank& rank) {
  rank.step(1.0F, 1.0F);
  rank.step(1.0F, 1.0F);
  synchronize_all(rank);
}

void finish(Rank& rank) {
  synchronize(rank.side_stream);
  synchronize_all(rank);
}

// Two modules of a unit. The units of a bucket that arrives in pieces are read on both streams.
TEST(CudaReaders, EachStreamOfAForwardWaitsForTheGather) {
  for (const Setting setting : {Setting{2, 300}, Setting{2, 300, 2, 3}}) {
    on_ranks(setting, [](Rank& rank, int) {
      prepare(rank);
      Pipeline& pipeline = *rank.pipeline;
      const auto read = [&](int unit) {
        pipeline.pre_forward(unit);
        rank.units[static_cast<std::size_t>(unit)]->read_parameters();
      };
      pipeline.begin_forward();
      rank.lanes->device->delay(rank.lanes->gather.stream(), kLate);
      read(1);
      on_another_stream(rank, [&] { read(2); });
      read(2);
      on_another_stream(rank, [&] { read(1); });
      finish(rank);
      pipeline.post_forward(1);
      pipeline.post_forward(2);
      pipeline.end_forward();
    });
  }
}

// Two hooks of one call, for a unit with two outputs.
TEST(CudaReaders, EachStreamOfABackwardWaitsForTheGather) {
  on_ranks({2, 300}, [](Rank& rank, int) {
    prepare(rank);
    Pipeline& pipeline = *rank.pipeline;
    const std::vector<CallId> calls = rank.forward();
    synchronize_all(rank);
    pipeline.backward().begin_backward();
    rank.lanes->device->delay(rank.lanes->gather.stream(), kLate);
    pipeline.backward().pre_backward(4, calls[4]);
    on_another_stream(rank, [&] {
      pipeline.backward().pre_backward(4, calls[4]);
      rank.units[4]->read_parameters();
    });
    finish(rank);
    pipeline.reset();
  });
}

// No gradient arrives on that stream, because the parameters that it reads are frozen.
TEST(CudaReaders, ASlotIsReleasedAfterAStreamThatGivesNoGradient) {
  on_ranks({2, 300}, [](Rank& rank, int) {
    prepare(rank);
    Pipeline& pipeline = *rank.pipeline;
    const std::vector<CallId> calls = rank.forward();
    pipeline.backward().begin_backward();
    pipeline.backward().pre_backward(4, calls[4]);
    on_another_stream(rank, [&] {
      pipeline.backward().pre_backward(4, calls[4]);
      rank.lanes->device->delay(rank.lanes->device->compute_stream(), kLate);
      rank.units[4]->read_parameters();
    });
    pipeline.backward().post_backward(4, calls[4]);
    finish(rank);
    pipeline.reset();
  });
}

TEST(CudaReaders, AStreamThatTheUserUnshardsOnWaitsForTheGather) {
  on_ranks({2, 300}, [](Rank& rank, int) {
    prepare(rank);
    rank.lanes->device->delay(rank.lanes->gather.stream(), kLate);
    const auto read = [&rank] {
      rank.pipeline->unshard(1);
      rank.pipeline->wait_for_unshard(1);
      rank.units[1]->read_parameters();
    };
    read();
    on_another_stream(rank, read);
    finish(rank);
    rank.pipeline->reshard(1);
  });
}

// The unit keeps its slot between the evaluations.
TEST(CudaReaders, AnEvaluationWaitsForTheGatherOfOneOnAnotherStream) {
  on_ranks({2, 300}, [](Rank& rank, int) {
    change_settings(*rank.pipeline, 0,
                    [](UnitSettings& settings) { settings.keeps_slot_after_evaluation = true; });
    prepare(rank);
    rank.lanes->device->delay(rank.lanes->gather.stream(), kLate);
    rank.evaluate();
    on_another_stream(rank, [&rank] { rank.evaluate(); });
    finish(rank);
  });
}

}  // namespace
}  // namespace fsdp::test
