// Flight records on the CUDA side: timed events tell how far a collective is, and nothing waits.
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/record/flight_recorder.h"
#include "stream_ranks.h"

namespace fsdp::test {
namespace {

constexpr std::size_t kEntries = 200;

void name_groups(Lanes& lanes, const std::string& name) {
  for (Lane* lane : {&lanes.gather, &lanes.reduce}) {
    std::vector<int> ranks;
    for (int rank = 0; rank < lane->communicator().size(); ++rank) {
      ranks.push_back(rank);
    }
    lane->communicator().set_flight_group(
        {name + "." + lane->stream().name(), "a lane", "nccl", ranks, 0});
  }
}

std::shared_ptr<FlightRecorder> record(Rank& rank) {
  auto recorder = std::make_shared<FlightRecorder>(
      0, kEntries, (std::filesystem::temp_directory_path() / "cuda_flights_").string());
  name_groups(*rank.lanes, "all");
  recorder->record(*rank.lanes);
  if (rank.replicas != nullptr) {
    name_groups(*rank.replicas, "replicas");
    recorder->record(*rank.replicas);
  }
  for (const auto& group : rank.lanes->groups) {
    name_groups(*group, "group");
  }
  for (const Mesh& mesh : rank.lanes->meshes) {
    name_groups(*mesh.lanes, "mesh");
  }
  return recorder;
}

std::vector<SeenFlight> flights_of(Lanes& lanes) { return lanes.gather.flights()->look().value(); }

class CudaFlights : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings, CudaFlights,
                         ::testing::Values(Setting{2, kDirectBytes}, Setting{2, 300, 2, 3},
                                           Setting{2, 300, 1, 0, 2}, Setting{4, 300, 1, 0, 1, 2},
                                           Setting{4, 300, 1, 0, 1, 0, 2}),
                         [](const auto& info) { return "Setting" + std::to_string(info.index); });

TEST_P(CudaFlights, AreCompleteWhenTheStepsAre) {
  const Setting setting = GetParam();
  on_ranks(setting, [&](Rank& rank, int) {
    const auto recorder = record(rank);
    rank.step(2.0F, 2.0F);
    rank.step(2.0F, 2.0F);
    synchronize_all(rank);
    std::set<std::string> groups;
    std::set<Collective> ops;
    for (Lanes* lanes : {rank.lanes.get(), rank.replicas.get()}) {
      if (lanes == nullptr) {
        continue;
      }
      for (const SeenFlight& seen : flights_of(*lanes)) {
        EXPECT_EQ(seen.state, FlightState::Completed) << seen.flight.label;
        EXPECT_GE(seen.seconds.value(), 0.0);
        EXPECT_EQ(seen.completed, 0);  // the device has a clock of its own
        groups.insert(seen.flight.group->name);
        ops.insert(seen.flight.plan.op);
      }
    }
    std::set<std::string> expected = {"all.gather", "all.reduce"};
    std::set<Collective> expected_ops = {Collective::AllGather, Collective::ReduceScatter};
    if (setting.sets > 1) {
      expected.insert({"replicas.gather", "replicas.reduce"});
      expected_ops.insert(Collective::AllReduce);
    }
    if (setting.group > 0) {
      expected.insert("group.gather");
      expected_ops.insert(Collective::GroupAllGather);
    }
    if (setting.experts > 0) {
      expected.insert({"mesh.gather", "mesh.reduce"});
    }
    EXPECT_EQ(groups, expected);
    EXPECT_EQ(ops, expected_ops);
  });
}

TEST(CudaFlightRecords, TellOfAStreamThatIsLate) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    const auto recorder = record(rank);
    for (int step = 0; step < 3; ++step) {  // the first ones also compare the ranks
      rank.step(2.0F, 2.0F);
    }
    synchronize_all(rank);
    const std::size_t before = flights_of(*rank.lanes).size();
    std::promise<void> opened;
    enqueue(rank.lanes->gather.stream().native_handle(),
            [future = opened.get_future().share()] { future.wait(); });
    rank.pipeline->begin_forward();
    rank.pipeline->unshard(0);
    const std::vector<SeenFlight> seen = flights_of(*rank.lanes);
    ASSERT_GT(seen.size(), before);
    EXPECT_EQ(seen.back().state, FlightState::Scheduled);
    opened.set_value();
    synchronize_all(rank);
    EXPECT_EQ(flights_of(*rank.lanes).back().state, FlightState::Completed);
    rank.pipeline->reset();
  });
}

TEST(CudaFlightRecords, LeaveOutWhatAGraphCaptures) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int) {
    const auto recorder = record(rank);
    for (auto& unit : rank.units) {
      unit->keep_gradients();
    }
    for (int step = 0; step < 3; ++step) {
      rank.step(2.0F, 2.0F);
    }
    synchronize_all(rank);
    const std::size_t before = flights_of(*rank.lanes).size();
    begin_capture(compute_stream);
    rank.step(3.0F, 3.0F);
    end_capture(compute_stream).replay();
    EXPECT_EQ(flights_of(*rank.lanes).size(), before);
    rank.step(4.0F, 4.0F);
    synchronize_all(rank);
    EXPECT_GT(flights_of(*rank.lanes).size(), before);
  });
}

}  // namespace
}  // namespace fsdp::test
