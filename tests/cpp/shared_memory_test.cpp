// Collectives through shared memory, with the ranks as threads of this process, which then share
// every address: ThreadSanitizer sees a read that nothing orders behind its write. Ranks in
// processes of their own, and what happens when one ends, are in tests/test_shared_memory.py.
#include "comm/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/with_dtype.h"
#include "comm/meeting.h"
#include "comm/rank_order_sum.h"
#include "device/host_stream.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

const std::string kFine = "nothing was thrown";
constexpr milliseconds kLong{60000};  // never reached where the code is right
constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};

// - The arena

TEST(Arena, GivesZerosAndTakesThemBack) {
  const auto arena = Arena::of_this_process();
  const std::size_t before = arena->allocated_bytes();
  void* first = nullptr;
  for (int round = 0; round < 2; ++round) {
    const auto a = Arena::allocate(arena, 10000);
    const auto b = Arena::allocate(arena, std::size_t{3} << 20);
    const auto c = Arena::allocate(arena, 1);
    EXPECT_EQ(arena->allocated_bytes() - before, 12288 + (std::size_t{3} << 20) + 4096);
    EXPECT_EQ(arena->offset_of(b.get()) % (std::size_t{2} << 20), 0U);
    const auto* bytes = static_cast<const char*>(a.get());
    EXPECT_TRUE(std::all_of(bytes, bytes + 10000, [](char byte) { return byte == 0; }));
    std::memset(a.get(), 7, 10000);
    if (round == 0) {
      first = a.get();
    }
    EXPECT_EQ(a.get(), first) << "of what came back the first is taken again";
  }
  EXPECT_EQ(arena->allocated_bytes(), before);
}

TEST(Arena, JoinsWhatComesBackInAnyOrder) {
  const auto arena = Arena::of_this_process();
  const std::size_t before = arena->allocated_bytes();
  std::mt19937 random(0);
  std::vector<std::shared_ptr<void>> held;
  for (int i = 0; i < 300; ++i) {
    if (held.empty() || random() % 3 != 0) {
      const std::size_t bytes = 1 + random() % 100000;
      held.push_back(Arena::allocate(arena, bytes));
      const auto* begin = static_cast<const char*>(held.back().get());
      EXPECT_TRUE(std::all_of(begin, begin + bytes, [](char byte) { return byte == 0; }));
      std::memset(held.back().get(), 1, bytes);
    } else {
      std::swap(held[random() % held.size()], held.back());
      held.pop_back();
    }
  }
  held.clear();
  EXPECT_EQ(arena->allocated_bytes(), before);
  // One range again: most of it can be had at once. (Its pages would be too many to be had.)
  EXPECT_FALSE(arena->contains(nullptr, 1));
  EXPECT_FALSE(arena->contains(held.data(), 1));
}

TEST(Arena, SaysHowMuchThereIsNot) {
  const auto arena = Arena::of_this_process();
  const std::string message =
      message_of([&] { Arena::allocate(arena, arena->address().bytes + 1); });
  EXPECT_NE(message.find("more bytes of shared memory"), std::string::npos) << message;
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork
// What `body` returns in a child that was forked from here.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 99;
    try {
      result = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(result);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Arena, IsReadByOtherProcesses) {
  const auto arena = Arena::of_this_process();
  const auto memory = Arena::allocate(arena, 4096);
  std::strcpy(static_cast<char*>(memory.get()), "hello");
  const auto address = arena->address();
  const auto offset = arena->offset_of(memory.get());
  EXPECT_EQ(in_child([&] {
              const auto view = ArenaView::of(address);
              const bool mapped_anew = view->at(offset) != memory.get();
              return mapped_anew && std::strcmp(view->at(offset), "hello") == 0 ? 0 : 1;
            }),
            0);
}

TEST(Arena, StaysWhenAForkedChildFreesItsCopy) {
  const auto arena = Arena::of_this_process();
  auto memory = Arena::allocate(arena, 4096);
  auto* bytes = static_cast<char*>(memory.get());
  bytes[0] = 5;
  EXPECT_EQ(in_child([&] {
              memory.reset();
              const auto own = Arena::of_this_process();
              const auto mine = Arena::allocate(own, 4096);
              static_cast<char*>(mine.get())[0] = 9;
              return own->address().pid == ::getpid() && mine.get() != bytes ? 0 : 1;
            }),
            0);
  EXPECT_EQ(bytes[0], 5);
}

TEST(Arena, IsTheOwnersAlone) {
  if (::getuid() != 0) {
    GTEST_SKIP() << "expects to be root, to become another user";
  }
  const auto address = Arena::of_this_process()->address();
  EXPECT_EQ(in_child([&] {
              if (::setgid(65534) != 0 || ::setuid(65534) != 0) {
                return 2;
              }
              const std::string message = message_of([&] { ArenaView::of(address); });
              return message.find("run all ranks as one user") != std::string::npos ? 0 : 1;
            }),
            0);
}

TEST(Arena, KnowsTheStateOfAProcess) {
  ArenaAddress child;
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::pause();
    ::_exit(0);
  }
  int status = 0;
  child = Arena::of_this_process()->address();
  EXPECT_EQ(state_of(child), ProcessState::Runs);
  child.started += 1;
  EXPECT_EQ(state_of(child), ProcessState::Ended) << "another process with the same number";
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  child.pid = pid;
  EXPECT_EQ(state_of(child), ProcessState::Ended);
}
#endif

TEST(Arena, DoesNotTakeAProcessForEndedThatItCannotLookAt) {
  const ArenaAddress here = Arena::of_this_process()->address();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const ProcessState state = state_of(here);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(state, ProcessState::Runs);
}

TEST(ArenaView, SaysWhyItCannotBe) {
  const ArenaAddress here = Arena::of_this_process()->address();
  ArenaAddress elsewhere = here;
  elsewhere.token += 1;
  elsewhere.host[0] = '?';
  EXPECT_NE(message_of([&] { ArenaView::of(elsewhere); }).find("on one host"), std::string::npos);
  elsewhere = here;
  elsewhere.token += 1;
  elsewhere.pid_namespace += 1;
  EXPECT_NE(message_of([&] { ArenaView::of(elsewhere); }).find("PID namespace"), std::string::npos);
  elsewhere = here;
  elsewhere.token += 1;
  EXPECT_NE(message_of([&] { ArenaView::of(elsewhere); }).find("something else"),
            std::string::npos);
  elsewhere.fd = 0;  // no arena, perhaps no file
  EXPECT_NE(message_of([&] { ArenaView::of(elsewhere); }).find("shared memory expects"),
            std::string::npos);
}

// - Sums

TEST(RankOrderSum, RoundsOnceAndInTheOrderOfRanks) {
  const std::uint16_t big = element::narrow<element::BFloat16>(256.0f).bits;
  const std::uint16_t one = element::narrow<element::BFloat16>(1.0f).bits;
  std::uint16_t result = 0;
  sum_in_rank_order({&big, &one, &one}, &result, 1, DType::BFloat16);
  EXPECT_EQ(element::widen(element::BFloat16{result}), 258.0f)
      << "one by one in bf16 it would be 256";
  const float values[] = {1e8f, 1.0f, -1e8f};
  float sum = -1.0f;
  sum_in_rank_order({&values[0], &values[1], &values[2]}, &sum, 1, DType::Float32);
  EXPECT_EQ(sum, 0.0f);
  sum_in_rank_order({&values[0], &values[2], &values[1]}, &sum, 1, DType::Float32);
  EXPECT_EQ(sum, 1.0f);
  EXPECT_NE(message_of([&] {
              sum_in_rank_order({&sum, &sum}, &sum, 1, DType::Bytes);
            }).find("floating dtype"),
            std::string::npos);
}

// Bit for bit, except that the sum of two NaNs is either of them, which the compiler chooses.
template <typename T>
bool is_same(T a, T b) {
  const auto wide_a = element::widen(a);
  const auto wide_b = element::widen(b);
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (wide_a != wide_a && wide_b != wide_b);
}

TEST(RankOrderSum, HasTheSameBitsWithEveryInstructionSet) {
  constexpr std::size_t kMost = 5000;  // elements; more than two blocks of the loops
  std::mt19937_64 random(5);
  std::vector<std::vector<std::uint64_t>> memory(5, std::vector<std::uint64_t>(kMost + 8));
  for (auto& source : memory) {
    std::generate(source.begin(), source.end(), std::ref(random));
  }
  for (const DType dtype : kFloats) {
    with_float(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (const std::size_t numel : {0, 1, 7, 31, 65, 2047, 2049, 5000}) {
        for (const std::size_t count : {2, 3, 5}) {
          std::vector<const void*> sources;
          for (std::size_t i = 0; i < count; ++i) {
            sources.push_back(reinterpret_cast<const T*>(memory[i].data()) + i);
          }
          std::vector<T> expected(numel + 1);
          sum_in_rank_order(sources, expected.data(), numel, dtype, InstructionSet::Baseline);
          for (const auto set : {InstructionSet::Avx2, InstructionSet::Avx512}) {
            if (!is_supported(set)) {
              continue;
            }
            std::vector<T> actual(numel + 1);
            sum_in_rank_order(sources, actual.data(), numel, dtype, set);
            for (std::size_t i = 0; i < numel; ++i) {
              ASSERT_TRUE(is_same(actual[i], expected[i]))
                  << name(dtype) << ", " << name(set) << ", element " << i << " of " << numel;
            }
          }
        }
      }
    });
  }
}

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

// Runs `body` on as many threads as there are ranks; returns what each has thrown.
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

void expect_fine(const std::vector<std::string>& messages) {
  for (const std::string& message : messages) {
    EXPECT_EQ(message, kFine);
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

// A collective of random kind, size, dtype and place, of which all ranks draw the same. Returns how
// many elements are wrong, and how many there are.
class RandomCollective {
 public:
  RandomCollective(std::mt19937& random, int ranks) : ranks_(ranks) {
    kind_ = static_cast<int>(random() % 6);
    dtype_ = kFloats[random() % 4];
    seed_ = static_cast<int>(random() % 1000);
    const std::size_t most = random() % 20 == 0 ? 400000 : 3000;
    numel_ = random() % most;
    root_ = static_cast<int>(random() % static_cast<unsigned>(ranks));
    in_shared_ = random() % 3 != 0;
    delays_ = random() % 4 == 0;
    salt_ = random();
  }

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
      case 3:
        return reduce(rank);
      case 4:
        return broadcast(rank);
      default:
        rank.gather.barrier(rank.gather_stream);
        rank.gather_stream.synchronize();
        return 0;
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
    if (parts > 1) {
      rank.gather.group_start();
    }
    for (std::size_t part = 0; part < parts; ++part) {
      rank.gather.all_gather(rank.gather_stream,
                             static_cast<char*>(input.get()) + bytes(part * numel_),
                             static_cast<char*>(output.get()) +
                                 bytes(part * numel_) * static_cast<std::size_t>(ranks_),
                             bytes(numel_));
    }
    if (parts > 1) {
      rank.gather.group_end();
    }
    rank.gather_stream.synchronize();
    // Others may not read it any more.
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

  int broadcast(Rank& rank) const {
    const auto data = rank.memory(bytes(numel_) + 1, in_shared_);
    for (std::size_t i = 0; i < numel_; ++i) {
      write(data.get(), dtype_, i, value_of(seed_, rank.number, i));
    }
    rank.gather.broadcast(rank.gather_stream, data.get(), bytes(numel_), root_);
    rank.gather_stream.synchronize();
    int wrong = 0;
    for (std::size_t i = 0; i < numel_; ++i) {
      wrong += read(data.get(), dtype_, i) != value_of(seed_, root_, i) ? 1 : 0;
      write(data.get(), dtype_, i, -1.0);
    }
    return wrong;
  }

  int ranks_;
  int kind_;
  DType dtype_;
  int seed_;
  std::size_t numel_;
  int root_;
  bool in_shared_;
  bool delays_;
  std::uint_fast32_t salt_;
};

class SharedMemoryRanks : public ::testing::TestWithParam<int> {};

TEST_P(SharedMemoryRanks, RandomCollectivesGiveNoWrongElement) {
  constexpr int kCollectives = 1000;
  std::atomic<int> wrong{0};
  expect_fine(run_ranks(GetParam(), [&](Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(GetParam()));
    for (int i = 0; i < kCollectives && wrong == 0; ++i) {
      wrong += RandomCollective(random, GetParam()).run(rank);
    }
  }));
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, SharedMemoryRanks, ::testing::Values(1, 2, 3, 5));

// Both lanes at once, many collectives in a queue, nothing but the streams' order between them.
TEST(SharedMemory, LanesRunBesideEachOther) {
  constexpr int kRounds = 100;
  constexpr std::size_t kNumel = 1000;
  expect_fine(run_ranks(4, [&](Rank& rank) {
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

// The same ranks in several groups at once, as hybrid sharding has them.
TEST(SharedMemory, GroupsDoNotKnowOfEachOther) {
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
    EXPECT_EQ(rank.get(), kFine);
  }
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::string kLayer = "the all-gather of unit 'layer'";

TEST(SharedMemory, ARankThatDoesNotComeIsNamed) {
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
        rank.gather.announce(kLayer);
        rank.gather.all_gather(rank.gather_stream, &mine, all, sizeof(int));
        rank.gather_stream.synchronize();
      },
      milliseconds(150));
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "rank 0: waited 150 ms for rank 1")) << message;
    EXPECT_TRUE(contains(message, kLayer)) << message;
  }
}

TEST(SharedMemory, ARankThatLeavesIsNamed) {
  const auto messages = run_ranks(3, [](Rank& rank) {
    if (rank.number == 2) {
      return;
    }
    float sum = 1;
    rank.reduce.announce(kLayer);
    rank.reduce.all_reduce(rank.reduce_stream, &sum, 1, DType::Float32);
    rank.reduce_stream.synchronize();
  });
  EXPECT_EQ(messages[2], kFine);
  EXPECT_TRUE(contains(messages[0], "rank 2 has closed its side before " + kLayer)) << messages[0];
  EXPECT_TRUE(contains(messages[1], "rank 2 has closed its side before " + kLayer)) << messages[1];
}

TEST(SharedMemory, AnAbortReachesEverybodyAndStays) {
  const auto messages = run_ranks(3, [](Rank& rank) {
    if (rank.number == 1) {
      rank.gather.abort("rank 1: the loss is NaN");
    }
    for (int i = 0; i < 2; ++i) {
      const std::string message = message_of([&] {
        rank.gather.barrier(rank.gather_stream);
        rank.gather_stream.synchronize();
      });
      EXPECT_TRUE(contains(message, "rank 1: the loss is NaN")) << message;
    }
    EXPECT_TRUE(contains(message_of([&] { rank.gather.check(); }), "the loss is NaN"));
    rank.reduce.barrier(rank.reduce_stream);  // another communicator
    rank.reduce_stream.synchronize();
  });
  expect_fine(messages);
}

TEST(SharedMemory, InputsInTheArenaAndElsewhereDoNotGoTogether) {
  const auto messages = run_ranks(2, [](Rank& rank) {
    const auto input = rank.memory(64, /*shared=*/rank.number == 0);
    char all[128];
    rank.gather.all_gather(rank.gather_stream, input.get(), all, 64);
    rank.gather_stream.synchronize();
  });
  for (const std::string& message : messages) {
    EXPECT_TRUE(contains(message, "expected to run the same collectives")) << message;
  }
}

// - Meetings by themselves

class TwoRanksMeet : public ::testing::Test {
 protected:
  void meet_from(std::uint32_t newest) {
    const auto arena = Arena::of_this_process();
    const auto view = ArenaView::of(arena->address());
    std::vector<Peer> peers;
    for (int r = 0; r < 2; ++r) {
      memory_.push_back(Arena::allocate(arena, sizeof(Mailbox)));
      mailboxes_[r] = new (memory_.back().get()) Mailbox;
      mailboxes_[r]->posted = mailboxes_[r]->finished = newest;
      peers.push_back({arena->address(), view, mailboxes_[r], r});
    }
    for (int r = 0; r < 2; ++r) {
      ranks_[r] = std::make_unique<Meetings>(*mailboxes_[r], peers, r, milliseconds(300), newest);
      ranks_[r]->begin(kLayer);
    }
  }

  std::vector<std::shared_ptr<void>> memory_;
  Mailbox* mailboxes_[2];
  std::unique_ptr<Meetings> ranks_[2];
};

TEST_F(TwoRanksMeet, AcrossTheEndOfTheNumbers) {
  meet_from(0xfffffffdu);
  for (int i = 0; i < 6; ++i) {
    for (auto& rank : ranks_) {
      rank->arrive({});
    }
    auto other = std::async(std::launch::async, [&] {
      ranks_[1]->await(0, {});
      ranks_[1]->leave();
    });
    ranks_[0]->await(1, {});
    ranks_[0]->leave();
    other.get();
  }
  EXPECT_EQ(mailboxes_[0]->posted, 3U);
  // And one that does not come is missed there, too.
  meet_from(0xffffffffu);
  ranks_[0]->arrive({});
  EXPECT_TRUE(contains(message_of([&] { ranks_[0]->await(1, {}); }), "waited 300 ms for rank 1"));
}

// What it had to read is gone when it fails, though it had read all that it needed itself.
TEST_F(TwoRanksMeet, WhoReadsOfARankThatThenFailsFails) {
  meet_from(0);
  for (auto& rank : ranks_) {
    rank->arrive({});
  }
  ranks_[0]->await(1, {});
  const std::string reason = message_of([&] { ranks_[0]->leave(); });
  EXPECT_TRUE(contains(reason, "waited 300 ms for rank 1")) << reason;
  ranks_[0]->abort(reason);
  ranks_[1]->await(0, {});
  EXPECT_EQ(mailboxes_[0]->finished, 1U);
  EXPECT_TRUE(contains(message_of([&] { ranks_[1]->leave(); }), reason));
}

TEST(SharedMemory, RanksThatDisagreeSaySo) {
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

TEST(SharedMemory, RefusesWhatIsNotSo) {
  expect_fine(run_ranks(1, [](Rank& rank) {
    int data = 0;
    EXPECT_TRUE(
        contains(message_of([&] { rank.gather.broadcast(rank.gather_stream, &data, 4, 1); }),
                 "a root from 0 to 0 but got 1"));
  }));
  const SharedMemoryEndpoint endpoint(0);
  EXPECT_TRUE(contains(message_of([&] { endpoint.connect({"short"}, 0, kLong); }),
                       "one version of fsdp_ext"));
}

}  // namespace
}  // namespace fsdp::test
