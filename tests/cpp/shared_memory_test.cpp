// Collectives through shared memory, with threads of this process as ranks. Threads share every
// address, so ThreadSanitizer sees a read that nothing orders after its write. Ranks in processes
// of their own, and ranks that end, are in tests/comm/test_shared_memory.py.
#include "comm/shared_memory/shared_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/with_dtype.h"
#include "comm/shared_memory/rank_order_sum.h"
#include "device/host_stream.h"
#include "meet.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60000};  // never reached if the code is right
constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};

// - Ranks as threads

struct Rank {
  int number;
  Device& device;
  Communicator& gather;
  Communicator& reduce;
  Stream& gather_stream;
  Stream& reduce_stream;

  std::shared_ptr<void> memory(std::size_t bytes, bool shared) {
    return shared ? gather.allocate(device, bytes, BufferUse::Input) : device.allocate(bytes);
  }
};

// Runs `body` on a thread per rank and returns the message of each.
std::vector<std::string> run_ranks(int size, const std::function<void(Rank&)>& body,
                                   milliseconds timeout = kLong) {
  std::vector<SharedMemoryEndpoint> endpoints;
  std::vector<std::string> addresses;
  for (int r = 0; r < size; ++r) {
    endpoints.emplace_back(r);
    addresses.push_back(endpoints.back().address());
  }
  std::vector<std::future<std::string>> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      return message_of([&] {
        const auto device = make_host_device(kLong);
        const auto [gather, reduce] =
            endpoints[static_cast<std::size_t>(r)].connect(addresses, r, timeout);
        const auto gather_stream = device->new_stream("gather");
        const auto reduce_stream = device->new_stream("reduce");
        gather->set_stream(*gather_stream);
        reduce->set_stream(*reduce_stream);
        Rank rank{r, *device, *gather, *reduce, *gather_stream, *reduce_stream};
        body(rank);
      });
    }));
  }
  std::vector<std::string> messages;
  for (auto& rank : ranks) {
    messages.push_back(rank.get());
  }
  return messages;
}

void expect_no_errors(const std::vector<std::string>& messages) {
  for (const std::string& message : messages) {
    EXPECT_EQ(message, kNothingThrown);
  }
}

// Small whole numbers, whose sums are exact in every dtype.
double value_of(int seed, int rank, std::size_t index) {
  return static_cast<double>(
      (static_cast<std::size_t>(seed) + 3 * static_cast<std::size_t>(rank) + index) % 7);
}

void write(void* data, DType dtype, std::size_t index, double value) {
  with_float(dtype, [&](auto element) {
    using T = decltype(element);
    static_cast<T*>(data)[index] = element::narrow<T>(value);
  });
}

double read(const void* data, DType dtype, std::size_t index) {
  double value = 0;
  with_float(dtype, [&](auto element) {
    value = element::widen(static_cast<const decltype(element)*>(data)[index]);
  });
  return value;
}

// A collective of random kind, size, dtype and place of its buffers. All ranks draw the same one.
class RandomCollective {
 public:
  RandomCollective(std::mt19937& random, int ranks) : ranks_(ranks) {
    kind_ = static_cast<int>(random() % 4);
    dtype_ = kFloats[random() % 4];
    seed_ = static_cast<int>(random() % 1000);
    const std::size_t most = random() % 20 == 0 ? 400000 : 3000;
    numel_ = random() % most;
    in_shared_ = random() % 3 != 0;
    delays_ = random() % 4 == 0;
    salt_ = random();
  }

  // Returns the number of wrong elements.
  int run(Rank& rank) const {
    std::mt19937 own(static_cast<unsigned>(salt_) + static_cast<unsigned>(rank.number));
    if (delays_) {
      rank.device.delay(rank.gather_stream, std::chrono::microseconds(own() % 300));
      rank.device.delay(rank.reduce_stream, std::chrono::microseconds(own() % 300));
    }
    switch (kind_) {
      case 0:
        return gather(rank, 1);
      case 1:
        return gather(rank, 3);
      case 2:
        return scatter(rank);
      default:
        return reduce(rank);
    }
  }

 private:
  std::size_t bytes(std::size_t numel) const { return numel * itemsize(dtype_); }

  double sum_at(std::size_t index) const {
    double sum = 0;
    for (int r = 0; r < ranks_; ++r) {
      sum += value_of(seed_, r, index);
    }
    return sum;
  }

  int gather(Rank& rank, std::size_t parts) const {
    const auto input = rank.memory(bytes(numel_ * parts) + 1, in_shared_);
    const auto output =
        rank.memory(bytes(numel_ * parts) * static_cast<std::size_t>(ranks_) + 1, seed_ % 2 == 0);
    for (std::size_t i = 0; i < numel_ * parts; ++i) {
      write(input.get(), dtype_, i, value_of(seed_, rank.number, i));
    }
    std::vector<GatherPart> gathers;
    for (std::size_t part = 0; part < parts; ++part) {
      gathers.push_back({static_cast<char*>(input.get()) + bytes(part * numel_),
                         static_cast<char*>(output.get()) +
                             bytes(part * numel_) * static_cast<std::size_t>(ranks_),
                         bytes(numel_)});
    }
    if (parts > 1) {
      rank.gather.all_gather_parts(rank.gather_stream, gathers);
    } else {
      rank.gather.all_gather(rank.gather_stream, input.get(), output.get(), bytes(numel_));
    }
    rank.gather_stream.synchronize();
    // No peer may read the input any more.
    std::memset(input.get(), 0xff, bytes(numel_ * parts));
    int wrong = 0;
    for (std::size_t part = 0; part < parts; ++part) {
      for (int r = 0; r < ranks_; ++r) {
        for (std::size_t i = 0; i < numel_; ++i) {
          const std::size_t at = part * numel_ * static_cast<std::size_t>(ranks_) +
                                 static_cast<std::size_t>(r) * numel_ + i;
          wrong += read(output.get(), dtype_, at) != value_of(seed_, r, part * numel_ + i) ? 1 : 0;
        }
      }
    }
    return wrong;
  }

  int scatter(Rank& rank) const {
    const auto ranks = static_cast<std::size_t>(ranks_);
    const auto input = rank.memory(bytes(numel_ * ranks) + 1, in_shared_);
    const auto output = rank.memory(bytes(numel_) + 1, seed_ % 2 == 0);
    for (std::size_t i = 0; i < numel_ * ranks; ++i) {
      write(input.get(), dtype_, i, value_of(seed_, rank.number, i));
    }
    rank.reduce.reduce_scatter(rank.reduce_stream, input.get(), output.get(), numel_, dtype_);
    rank.reduce_stream.synchronize();
    std::memset(input.get(), 0xff, bytes(numel_ * ranks));
    int wrong = 0;
    for (std::size_t i = 0; i < numel_; ++i) {
      const std::size_t at = static_cast<std::size_t>(rank.number) * numel_ + i;
      wrong += read(output.get(), dtype_, i) != sum_at(at) ? 1 : 0;
    }
    return wrong;
  }

  int reduce(Rank& rank) const {
    const auto data = rank.memory(bytes(numel_) + 1, in_shared_);
    for (std::size_t i = 0; i < numel_; ++i) {
      write(data.get(), dtype_, i, value_of(seed_, rank.number, i));
    }
    rank.reduce.all_reduce(rank.reduce_stream, data.get(), numel_, dtype_);
    rank.reduce_stream.synchronize();
    int wrong = 0;
    for (std::size_t i = 0; i < numel_; ++i) {
      wrong += read(data.get(), dtype_, i) != sum_at(i) ? 1 : 0;
      write(data.get(), dtype_, i, -1.0);
    }
    return wrong;
  }

  int ranks_;
  int kind_;
  DType dtype_;
  int seed_;
  std::size_t numel_;
  bool in_shared_;
  bool delays_;
  std::uint_fast32_t salt_;
};

class SharedMemoryRanks : public ::testing::TestWithParam<int> {};

TEST_P(SharedMemoryRanks, RandomCollectivesHaveNoWrongElement) {
  constexpr int kCollectives = 1000;
  std::atomic<int> wrong{0};
  expect_no_errors(run_ranks(GetParam(), [&](Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(GetParam()));
    for (int i = 0; i < kCollectives && wrong == 0; ++i) {
      wrong += RandomCollective(random, GetParam()).run(rank);
    }
  }));
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, SharedMemoryRanks, ::testing::Values(1, 2, 3, 5));

// Many collectives are queued on both lanes, with nothing between them but the order of the
// streams.
TEST(SharedMemory, BothLanesRunAtTheSameTime) {
  constexpr int kRounds = 100;
  constexpr std::size_t kNumel = 1000;
  expect_no_errors(run_ranks(4, [&](Rank& rank) {
    const auto input = rank.memory(kNumel * 4, true);
    const auto summed = rank.memory(kNumel * 4 * 4, true);
    auto* mine = static_cast<float*>(input.get());
    auto* segments = static_cast<float*>(summed.get());
    std::vector<float> gathered(kNumel * 4);
    std::vector<float> reduced(kNumel);
    int wrong = 0;
    for (int round = 0; round < kRounds; ++round) {
      static_cast<HostQueue&>(rank.gather_stream).enqueue([&, round] {
        std::fill_n(mine, kNumel, static_cast<float>(round * 10 + rank.number));
      });
      rank.gather.all_gather(rank.gather_stream, mine, gathered.data(), kNumel * 4);
      static_cast<HostQueue&>(rank.gather_stream).enqueue([&, round] {
        for (std::size_t r = 0; r < 4; ++r) {
          wrong +=
              gathered[r * kNumel + 5] != static_cast<float>(round * 10) + static_cast<float>(r);
        }
      });
      static_cast<HostQueue&>(rank.reduce_stream).enqueue([&, round] {
        std::fill_n(segments, kNumel * 4, static_cast<float>(round + rank.number));
      });
      rank.reduce.reduce_scatter(rank.reduce_stream, segments, reduced.data(), kNumel,
                                 DType::Float32);
    }
    rank.gather_stream.synchronize();
    rank.reduce_stream.synchronize();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(reduced[kNumel - 1], 4.0f * (kRounds - 1) + 6.0f);
  }));
}

// Each rank is in several groups at once, as in hybrid sharding.
TEST(SharedMemory, GroupsAreIndependent) {
  std::vector<SharedMemoryEndpoint> rows;
  std::vector<SharedMemoryEndpoint> columns;
  for (int r = 0; r < 4; ++r) {
    rows.emplace_back(r);
    columns.emplace_back(r);
  }
  std::vector<std::future<std::string>> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      return message_of([&] {
        const auto device = make_host_device(kLong);
        Stream& stream = device->compute_stream();
        const auto at = [&](const std::vector<SharedMemoryEndpoint>& all, int i) {
          return all[static_cast<std::size_t>(i)].address();
        };
        const int row = r / 2;
        const int column = r % 2;
        const auto [gather, unused] = rows[static_cast<std::size_t>(r)].connect(
            {at(rows, 2 * row), at(rows, 2 * row + 1)}, column, kLong);
        const auto [also_unused, reduce] = columns[static_cast<std::size_t>(r)].connect(
            {at(columns, column), at(columns, column + 2)}, row, kLong);
        for (int round = 0; round < 50; ++round) {
          const int mine = 100 * round + r;
          int all[2] = {};
          gather->all_gather(stream, &mine, all, sizeof(int));
          EXPECT_EQ(all[1], 100 * round + 2 * row + 1);
          float sum = static_cast<float>(r);
          reduce->all_reduce(stream, &sum, 1, DType::Float32);
          EXPECT_EQ(sum, static_cast<float>(2 * column + 2));
        }
      });
    }));
  }
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.get(), kNothingThrown);
  }
}

const std::string kLayer = "the all-gather of unit 'layer'";

TEST(SharedMemory, AMissingRankIsNamed) {
  const auto messages = run_ranks(
      2,
      [](Rank& rank) {
        if (rank.number == 1) {
          while (rank.gather.async_error().empty()) {
            std::this_thread::sleep_for(milliseconds(1));
          }
          rank.gather.check();
        }
        int mine = 0;
        int all[2];
        rank.gather.announce(kLayer, 0);
        rank.gather.all_gather(rank.gather_stream, &mine, all, sizeof(int));
        rank.gather_stream.synchronize();
      },
      milliseconds(150));
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "rank 0: waited 150 ms for rank 1")) << message;
    EXPECT_TRUE(contains(message, kLayer)) << message;
  }
}

// Rank 1 issues an all-gather, and the other ranks issue a reduce-scatter.
std::vector<std::string> take_different_branches(milliseconds timeout, bool hosts_wait) {
  static const std::string kGather = "the all-gather of unit 'layers.1'";
  static const std::string kReduce = "the reduce-scatter of the root";
  std::atomic<int> failed{0};
  return run_ranks(
      3,
      [&](Rank& rank) {
        for (int i = 0; i < 2; ++i) {
          meet(rank.gather, rank.gather_stream);
          meet(rank.reduce, rank.reduce_stream);
          rank.gather_stream.synchronize();
          rank.reduce_stream.synchronize();
        }
        const bool gathers = rank.number == 1;
        Communicator& communicator = gathers ? rank.gather : rank.reduce;
        Stream& stream = gathers ? rank.gather_stream : rank.reduce_stream;
        communicator.announce(gathers ? kGather : kReduce, 0);
        meet(communicator, stream);
        const auto done = rank.device.new_event();
        stream.record(*done);  // the stream begins
        while (!hosts_wait && communicator.async_error().empty()) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        const std::string message = message_of([&] { done->synchronize(kLong, kLayer); });
        failed += 1;
        while (failed < 3) {  // a rank that has closed its communicators is another error
          std::this_thread::sleep_for(milliseconds(1));
        }
        throw Error(message);
      },
      timeout);
}

const std::string kBranches =
    "Now rank 0 is in the reduce-scatter of the root, rank 1 is in the all-gather of unit "
    "'layers.1', rank 2 is in the reduce-scatter of the root.";

TEST(SharedMemory, RanksThatWaitForEachOtherInDifferentLanesSayTheSameLongBeforeTheTimeout) {
  for (const std::string& message : take_different_branches(kLong, /*hosts_wait=*/true)) {
    EXPECT_EQ(message, "ranks 0 and 1 wait for each other, so neither can go on. " + kBranches +
                           " Run the same forwards and backwards in the same order on every rank.");
  }
}

// A host that is not blocked may be slow, and still issue what the other ranks wait for. So the
// ranks wait until the timeout.
TEST(SharedMemory, RanksInDifferentLanesWaitForASlowHost) {
  const auto messages = take_different_branches(milliseconds(1300), /*hosts_wait=*/false);
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "waited 1300 ms for rank")) << message;
    EXPECT_TRUE(contains(message, kBranches)) << message;
  }
}

TEST(SharedMemory, ARankThatHasFailedInOneLaneSaysWhyInTheOther) {
  const std::string reason = "rank 1: the first error";
  const auto messages = run_ranks(2, [&](Rank& rank) {
    if (rank.number == 1) {
      rank.gather.abort(reason);
      return;
    }
    meet(rank.reduce, rank.reduce_stream);
    rank.reduce_stream.synchronize();
  });
  EXPECT_EQ(messages[0], reason);
}

TEST(SharedMemory, ARankThatHasClosedItsCommunicatorIsNamed) {
  const auto messages = run_ranks(3, [](Rank& rank) {
    if (rank.number == 2) {
      return;
    }
    float sum = 1;
    rank.reduce.announce(kLayer, 0);
    rank.reduce.all_reduce(rank.reduce_stream, &sum, 1, DType::Float32);
    rank.reduce_stream.synchronize();
  });
  EXPECT_EQ(messages[2], kNothingThrown);
  // The process may be about to end because of an exception.
  const std::string closed = "rank 2 has closed its communicator before " + kLayer +
                             ". If it raised, its last output says why.";
  EXPECT_TRUE(contains(messages[0], closed)) << messages[0];
  EXPECT_TRUE(contains(messages[1], closed)) << messages[1];
}

TEST(SharedMemory, AnAbortReachesAllRanksAndStays) {
  const auto messages = run_ranks(3, [](Rank& rank) {
    if (rank.number == 1) {
      rank.gather.abort("rank 1: the loss is NaN");
    }
    for (int i = 0; i < 2; ++i) {
      const std::string message = message_of([&] {
        meet(rank.gather, rank.gather_stream);
        rank.gather_stream.synchronize();
      });
      EXPECT_TRUE(contains(message, "rank 1: the loss is NaN")) << message;
    }
    EXPECT_TRUE(contains(message_of([&] { rank.gather.check(); }), "the loss is NaN"));
    meet(rank.reduce, rank.reduce_stream);  // another communicator
    rank.reduce_stream.synchronize();
  });
  expect_no_errors(messages);
}

TEST(SharedMemory, InputsInTheArenaOnSomeRanksOnlyAreAnError) {
  const auto messages = run_ranks(2, [](Rank& rank) {
    const auto input = rank.memory(64, /*shared=*/rank.number == 0);
    char all[128];
    rank.gather.all_gather(rank.gather_stream, input.get(), all, 64);
    rank.gather_stream.synchronize();
  });
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "ranks issued different collectives")) << message;
  }
}

TEST(SharedMemory, RanksThatIssueDifferentCollectivesSayBoth) {
  const auto messages = run_ranks(2, [](Rank& rank) {
    float data[2] = {};
    if (rank.number == 0) {
      rank.reduce.all_reduce(rank.reduce_stream, data, 2, DType::Float32);
    } else {
      rank.reduce.reduce_scatter(rank.reduce_stream, data, data, 1, DType::Float32);
    }
    rank.reduce_stream.synchronize();
  });
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "an all-reduce of 8 bytes (float32)")) << message;
    EXPECT_TRUE(contains(message, "a reduce-scatter of 8 bytes (float32)")) << message;
  }
}

TEST(SharedMemory, RefusesAWrongAddress) {
  const SharedMemoryEndpoint endpoint(0);
  const auto error_of = [&](const std::vector<std::string>& addresses, int rank) {
    return message_of([&] { endpoint.connect(addresses, rank, kLong); });
  };
  EXPECT_TRUE(contains(error_of({"short"}, 0), "Run one version of fsdp_ext"));
  const SharedMemoryEndpoint other(1);
  EXPECT_TRUE(contains(error_of({other.address()}, 0), "Rank 0 is not at place 0 of the 1 addr"));
  EXPECT_TRUE(
      contains(error_of({endpoint.address()}, 1), "Rank 0 is not at place 1 of the 1 addr"));
}

// Both have the same size, so nothing but the label tells them apart.
TEST(SharedMemory, RanksThatGatherDifferentUnitsSayBoth) {
  static const std::string kUnits[] = {"the all-gather of unit 'a'", "the all-gather of unit 'b'"};
  const auto messages = run_ranks(2, [](Rank& rank) {
    char mine = 0;
    char all[2] = {};
    rank.gather.announce(kUnits[rank.number], static_cast<std::uint64_t>(rank.number));
    rank.gather.all_gather(rank.gather_stream, &mine, all, 1);
    rank.gather_stream.synchronize();
  });
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, kUnits[0])) << message;
    EXPECT_TRUE(contains(message, kUnits[1])) << message;
  }
}

}  // namespace
}  // namespace fsdp::test
