// Ranks whose GPUs wait for each other in different lanes: Note [lanes of a GPU]. They are
// threads, with the runtime of fake_cudart and the collectives of fake_nccl.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "published_lanes.h"
#include "stream_ranks.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

constexpr int kFirst = 4;  // the number of rank 0 in the whole job
const std::string kNothing;

// What the ranks have in common.
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
  int looks[3] = {};  // of each rank while it was in a collective
};

class SharedBoard final : public Board {
 public:
  SharedBoard(Shared& shared, int rank) : shared_(shared), rank_(rank) {}

  void write(const std::string& place, const std::string& text) override {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.texts[place] = text;
  }
  std::string read(const std::string& place) override {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.looks[rank_] += place == "deadlock" ? 1 : 0;
    return shared_.texts[place];
  }

 private:
  Shared& shared_;
  int rank_;
};

class WatchedRank {
 public:
  WatchedRank(int number, int size, const nccl::UniqueId& id, milliseconds timeout, Shared& shared)
      : number(number), shared_(shared) {
    compute_stream = new_stream("compute");
    device = make_cuda_device(0, kTimeout, {&current_stream, &allocate_for});
    NcclOptions options{number, size, timeout, /*register_buffers=*/false};
    options.lanes = std::make_shared<DeviceLanes>();
    options.deadlocks = std::make_shared<DeadlockThread>(
        std::make_unique<SharedBoard>(shared, number), options.lanes, kFirst + number,
        /*interval=*/milliseconds(5));
    std::tie(lanes[kGather], lanes[kReduce]) = make_nccl_communicators(api(), *device, id, options);
    for (int lane : {kGather, kReduce}) {
      streams[lane] = device->new_stream("lane");
      done[lane] = device->new_event();
      lanes[lane]->serve(*streams[lane]);
    }
    reached = device->new_event();
  }

  ~WatchedRank() {
    synchronize_lanes();
    for (int lane : {kGather, kReduce}) {
      lanes[lane].reset();
      streams[lane].reset();
    }
    for (cudaStream_t stream : {compute_stream, other_stream}) {
      if (stream != nullptr) {
        synchronize(stream);
        cudaStreamDestroy(stream);
      }
    }
  }

  // A collective behind what the compute stream has reached.
  void issue(int lane) {
    device->compute_stream().record(*reached);
    streams[lane]->wait(*reached, kLabels[lane]);
    lanes[lane]->announce(kLabels[lane], 0);
    if (lane == kGather) {
      lanes[lane]->all_gather(*streams[lane], &shard, gathered, sizeof(shard));
    } else {
      lanes[lane]->reduce_scatter(*streams[lane], gradients, &sum, 1, DType::Float32);
    }
    streams[lane]->record(*done[lane]);
  }

  // Makes the compute stream wait for the newest collective of the lane.
  void await(int lane) { device->compute_stream().wait(*done[lane], kLabels[lane]); }

  // Issues gathers of another pair of lanes, such as a mesh's, to the stream of this gather lane.
  // Returns the stream's count of collectives before and after them.
  std::pair<std::uint32_t, std::uint32_t> issue_for_another_pair_of_lanes() {
    const std::unique_ptr<Device> own =
        make_cuda_device(0, kTimeout, {&current_stream, &allocate_for});
    nccl::UniqueId id;
    api().GetUniqueId(&id);
    const NcclOptions options{0, 1, kTimeout, /*register_buffers=*/false};
    const auto others = make_nccl_communicators(api(), *own, id, options);
    const auto counted = [this] { return streams[kGather]->behind().collectives[kGather]; };
    const std::uint32_t before = counted();
    for (int i = 0; i < 3; ++i) {
      others.first->announce(kLabels[kGather], 0);
      others.first->all_gather(*streams[kGather], &shard, gathered, sizeof(shard));
    }
    const std::uint32_t after = counted();
    synchronize_lanes();
    return {before, after};
  }

  // A collective of the lane `first`, and one of the other lane behind it.
  void issue_from(int first) {
    issue(first);
    await(first);
    issue(1 - first);
  }

  // A kernel that ends after ranks 0 and 1 have looked often while they were in collectives.
  void enqueue_long_kernel() {
    enqueue(compute_stream, [this] {
      constexpr int kOften = 40;
      for (int i = 0; i < 20000 && fewest_looks() < kOften; ++i) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      EXPECT_GE(fewest_looks(), kOften);
    });
  }

  void switch_compute_stream() {
    other_stream = compute_stream;
    compute_stream = new_stream("another one");
  }

  std::string await_error(int lane) {
    while (lanes[lane]->async_error().empty()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return lanes[lane]->async_error();
  }

  std::string errors_after_all_work() {
    synchronize_lanes();
    return lanes[kGather]->async_error() + lanes[kReduce]->async_error();
  }

  const int number;

 private:
  int fewest_looks() {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    return std::min(shared_.looks[0], shared_.looks[1]);
  }

  void synchronize_lanes() {
    for (int lane : {kGather, kReduce}) {
      synchronize(static_cast<cudaStream_t>(streams[lane]->native_handle()));
    }
  }

  Shared& shared_;
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> lanes[2];
  std::unique_ptr<Stream> streams[2];
  std::unique_ptr<Event> done[2];
  std::unique_ptr<Event> reached;
  cudaStream_t other_stream = nullptr;
  // Each lane has its own, because aborted lanes do not wait for each other.
  float shard = 1.0F;
  float gathered[3] = {};
  float gradients[3] = {};
  float sum = 0.0F;
};

// Runs `body` on a thread for each rank.
void on_watched_ranks(int size, const std::function<void(WatchedRank&)>& body,
                      milliseconds timeout = kTimeout) {
  nccl::UniqueId id;
  api().GetUniqueId(&id);
  Shared shared;
  std::vector<std::future<void>> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      WatchedRank rank(r, size, id, timeout, shared);
      body(rank);
    }));
  }
  for (auto& rank : ranks) {
    EXPECT_NO_THROW(rank.get());
  }
}

TEST(CudaDeadlocks, RanksThatWaitForEachOtherSayWhatTheyDo) {
  on_watched_ranks(3, [](WatchedRank& rank) {
    const int first = rank.number == 1 ? kReduce : kGather;
    rank.issue_from(first);
    for (int lane : {kGather, kReduce}) {
      const std::string error = rank.await_error(lane);
      EXPECT_TRUE(error.find(" wait for each other, so neither can go on. Now rank ") !=
                  std::string::npos)
          << error;
      EXPECT_TRUE(error.find("rank 5 is in " + kLabels[kReduce]) != std::string::npos) << error;
      const std::string of_other = " is in " + kLabels[kGather];
      EXPECT_TRUE(error.find("rank 4" + of_other) != std::string::npos ||
                  error.find("rank 6" + of_other) != std::string::npos)
          << error;
    }
  });
}

// In a step, gathers come behind the reductions of the step before, and reductions behind the
// gathers of their own forward. The streams have to know it from the waits that the schedule makes.
TEST(CudaDeadlocks, AStepsLanesComeBehindEachOther) {
  on_ranks({2, kDirectBytes}, [](Rank& rank, int r) {
    const auto behind = [&](const char* lane, int other) {
      return lane_named(*rank.lanes, lane).stream().behind().collectives[other];
    };
    rank.step(static_cast<float>(r + 1), mean_of(2, 0));
    const std::uint32_t reductions = behind("reduce", kReduce);
    EXPECT_GE(reductions, rank.units.size());
    rank.optimizer_step();
    const std::vector<CallId> calls = rank.forward();
    EXPECT_EQ(behind("gather", kReduce), reductions);
    EXPECT_LT(behind("reduce", kGather), behind("gather", kGather));
    rank.backward(calls, 1.0F);
    EXPECT_GT(behind("reduce", kReduce), reductions);
    EXPECT_GE(behind("reduce", kGather) + 1, behind("gather", kGather)) << "but for the exchange";
  });
}

TEST(CudaDeadlocks, AStreamCountsTheCollectivesOfItsOwnLanesAlone) {
  on_watched_ranks(2, [](WatchedRank& rank) {
    rank.issue(kGather);
    const auto [before, after] = rank.issue_for_another_pair_of_lanes();
    EXPECT_EQ(before, 1);
    EXPECT_EQ(after, 1);
  });
}

// Rank 0 is stuck in its gathers while rank 1 computes.
TEST(CudaDeadlocks, ALongKernelIsNone) {
  on_watched_ranks(2, [](WatchedRank& rank) {
    if (rank.number == 1) {
      rank.enqueue_long_kernel();
    }
    rank.issue_from(kGather);
    EXPECT_EQ(rank.errors_after_all_work(), kNothing);
  });
}

TEST(CudaDeadlocks, AnotherOrderIsNoneIfNothingWaits) {
  on_watched_ranks(2, [](WatchedRank& rank) {
    if (rank.number == 1) {
      rank.enqueue_long_kernel();
      rank.issue(kReduce);
      rank.issue(kGather);
    } else {
      rank.issue_from(kGather);
    }
    EXPECT_EQ(rank.errors_after_all_work(), kNothing);
  });
}

// What the program does on a stream of its own does not come behind what another stream waits for.
TEST(CudaDeadlocks, AnotherComputeStreamWaitsForNothing) {
  on_watched_ranks(2, [](WatchedRank& rank) {
    if (rank.number == 1) {
      rank.issue(kReduce);
      rank.await(kReduce);
      rank.switch_compute_stream();
      rank.enqueue_long_kernel();
      rank.issue(kGather);
    } else {
      rank.issue_from(kGather);
    }
    EXPECT_EQ(rank.errors_after_all_work(), kNothing);
  });
}

// A replay would use the communicator without being seen.
TEST(CudaDeadlocks, LanesThatWereCapturedTimeOut) {
  const milliseconds timeout(1500);
  on_watched_ranks(
      2,
      [](WatchedRank& rank) {
        begin_capture(compute_stream);
        rank.issue(kGather);
        rank.await(kGather);
        end_capture(compute_stream);
        const int first = rank.number == 1 ? kReduce : kGather;
        rank.issue_from(first);
        // The first to time out leaves its lane. Its other collective may then meet the other rank.
        const std::string errors = rank.errors_after_all_work();
        EXPECT_TRUE(errors.find("waited 1500 ms for ") != std::string::npos) << errors;
        EXPECT_TRUE(errors.find("wait for each other") == std::string::npos) << errors;
      },
      timeout);
}

}  // namespace
}  // namespace fsdp::test
