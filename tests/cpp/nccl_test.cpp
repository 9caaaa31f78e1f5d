// csrc/comm/nccl* over a library that only looks like NCCL (fake_nccl.h).
#include "comm/nccl.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "device/host_stream.h"
#include "fake_nccl.h"
#include "message_of.h"

namespace fsdp {
namespace {

using test::contains;
using test::kNothingThrown;
using test::message_of;

using std::chrono::milliseconds;

constexpr const char* kLibrary = FAKE_NCCL_LIBRARY;

test::FakeNccl& fake() {
  static void* const handle = dlopen(kLibrary, RTLD_NOW);
  return *reinterpret_cast<test::FakeNcclFunction*>(dlsym(handle, "fake_nccl"))();
}

#define EXPECT_SAYS(text, part) EXPECT_TRUE(contains(text, part)) << (text)

class NcclRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("FSDP_EXT_NCCL_SO", kLibrary, 1);
    api_ = nccl::find_library({});
    unsetenv("FSDP_EXT_NCCL_SO");
    fake().drain_calls();
    live_before_ = fake().live_communicators;
  }

  void TearDown() override {
    fake().async_error = 0;
    fake().init_result = 0;
    fake().register_result = 0;
    fake().register_fails_on_rank = -1;
    fake().others_wait_for_failed = false;
    fake().revoking_ends_calls = true;
    fake().revoking_hangs = false;
    fake().never_blocks = false;
    fake().has_windows = true;
    fake().gathers_nothing = false;
    fake().collectives_hang = false;
    fake().polls_in_progress = 2;
    fake().can_revoke = true;
    // Failed communicators stay. Those whose peers have gone close later, in threads of their own.
    const int expected = live_before_ + left_behind_;
    for (int i = 0; i < 5000 && fake().live_communicators != expected; ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(fake().live_communicators, expected);
    EXPECT_EQ(fake().live_buffers, 0);
    EXPECT_EQ(fake().registered_buffers, 0);
    EXPECT_EQ(fake().misplaced_windows, 0);
  }

  struct Rank {
    int number;
    Device& device;
    Communicator& gather;
    Communicator& reduce;
    Stream& stream;  // the calling thread
  };

  std::function<std::string(const std::string&)> ask_others_;  // NcclOptions::ask_others

  // Runs `body` on a thread per rank and returns the message of each.
  std::vector<std::string> run_ranks(int size, const std::function<void(Rank)>& body,
                                     milliseconds timeout = milliseconds(20000),
                                     bool register_buffers = true,
                                     const nccl::LaneSettings& gathers = {},
                                     const nccl::LaneSettings& reductions = {}) {
    nccl::UniqueId id;
    api_.GetUniqueId(&id);
    std::vector<std::future<std::string>> ranks;
    for (int r = 0; r < size; ++r) {
      ranks.push_back(std::async(std::launch::async, [=] {
        return message_of([&] {
          const auto device = make_host_device(milliseconds(20000));
          NcclOptions options{r, size, timeout, register_buffers, gathers, reductions};
          options.ask_others = ask_others_;
          const auto [gather, reduce] = make_nccl_communicators(api_, *device, id, options);
          body({r, *device, *gather, *reduce, device->compute_stream()});
        });
      }));
    }
    std::vector<std::string> messages;
    for (auto& rank : ranks) {
      messages.push_back(rank.get());
    }
    return messages;
  }

  nccl::Api api_;
  int live_before_ = 0;
  int left_behind_ = 0;
};

TEST_F(NcclRanks, GatherAndReduce) {
  const auto messages = run_ranks(3, [](Rank rank) {
    const float mine[] = {1.0f * rank.number, 10.0f};
    float gathered[6] = {};
    rank.gather.all_gather(rank.stream, mine, gathered, sizeof(mine));
    EXPECT_EQ(std::vector<float>(gathered, gathered + 6),
              (std::vector<float>{0, 10, 1, 10, 2, 10}));
    float reduced[2] = {};
    rank.reduce.reduce_scatter(rank.stream, gathered, reduced, 2, DType::Float32);
    EXPECT_EQ(reduced[0], 3.0f * rank.number);
    EXPECT_EQ(reduced[1], 30.0f);
    float summed[] = {1.0f, 2.0f};
    rank.reduce.all_reduce(rank.stream, summed, 2, DType::Float32);
    EXPECT_EQ(summed[1], 6.0f);
    float told = 5.0f + static_cast<float>(rank.number);
    rank.reduce.broadcast(rank.stream, &told, sizeof(told), 2);
    EXPECT_EQ(told, 7.0f);
    rank.gather.barrier(rank.stream);
    int all[3] = {};
    rank.gather.host_all_gather(rank.stream, &rank.number, all, sizeof(int));
    EXPECT_EQ(std::vector<int>(all, all + 3), (std::vector<int>{0, 1, 2}));
  });
  EXPECT_EQ(messages, (std::vector<std::string>(3, kNothingThrown)));
}

TEST_F(NcclRanks, LaunchAGroupAsOne) {
  run_ranks(2, [](Rank rank) {
    const int mine[] = {rank.number, rank.number + 10};
    int first[2];
    int second[2];
    ASSERT_EQ(rank.gather.gather_by(), GatherBy::Size);
    rank.gather.group_start();
    rank.gather.all_gather(rank.stream, &mine[0], first, sizeof(int));
    rank.gather.all_gather(rank.stream, &mine[1], second, sizeof(int));
    rank.gather.group_end();
    EXPECT_EQ(first[1], 1);
    EXPECT_EQ(second[1], 11);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "group of 2"), 2);
}

// Note [blocking communicators]
TEST_F(NcclRanks, JoinWithoutBlockingAndThenBlock) {
  run_ranks(1, [](Rank) {});
  EXPECT_EQ(fake().drain_calls(),
            (std::vector<std::string>{"non-blocking init", "split", "split", "finalize", "destroy",
                                      "finalize", "destroy", "finalize", "destroy"}));
}

TEST_F(NcclRanks, GiveEachLaneItsSettings) {
  fake().splits.clear();
  nccl::LaneSettings gathers;
  gathers.cta_policy = 1;
  gathers.cluster_size = 2;
  nccl::LaneSettings reductions;
  reductions.min_ctas = 2;
  reductions.max_ctas = 8;
  run_ranks(1, [](Rank) {}, milliseconds(20000), true, gathers, reductions);
  ASSERT_EQ(fake().splits.size(), 2U);
  const nccl::Config& gather = fake().splits[0];
  EXPECT_EQ(gather.size, sizeof(nccl::Config));
  EXPECT_EQ(gather.version, 22800U);
  EXPECT_EQ(gather.cta_policy, 1);
  EXPECT_EQ(gather.cga_cluster_size, 2);
  EXPECT_EQ(gather.max_ctas, nccl::kUndefined);
  // What 2.18 has, no newer library takes for more.
  const nccl::Config& reduce = fake().splits[1];
  EXPECT_EQ(reduce.size, 48U);
  EXPECT_EQ(reduce.version, 21800U);
  EXPECT_EQ(reduce.min_ctas, 2);
  EXPECT_EQ(reduce.max_ctas, 8);
  EXPECT_EQ(reduce.cta_policy, nccl::kUndefined);
}

TEST_F(NcclRanks, RefuseAPolicyThatTheVersionLacksOrThatIsNotSafe) {
  const auto message_with = [&](int version, int policy) {
    api_.version = version;
    nccl::LaneSettings gathers;
    gathers.cta_policy = policy;
    return run_ranks(1, [](Rank) {}, milliseconds(20000), true, gathers).front();
  };
  EXPECT_SAYS(message_with(22703, 1),
              "FSDP_EXT_NCCL_GATHER has a cta_policy, which NCCL has from 2.28 on, but the process "
              "uses NCCL 2.27.3. Upgrade NCCL, or leave cta_policy out.");
  EXPECT_SAYS(message_with(22809, nccl::kZeroCtas),
              "symmetric kernels of NCCL 2.28.9 may read a buffer before it is written");
  EXPECT_EQ(message_with(22809, 1), kNothingThrown);
  EXPECT_EQ(message_with(23007, nccl::kZeroCtas), kNothingThrown);
}

TEST_F(NcclRanks, SayThatSomeRankHasNotJoined) {
  fake().polls_in_progress = 1 << 30;
  const auto messages = run_ranks(1, [](Rank) {}, milliseconds(50));
  EXPECT_SAYS(messages[0], "rank 0 waited 50 ms for NCCL to join 1 ranks");
}

TEST_F(NcclRanks, PassOnTheTextOfNcclIfTheyCannotJoin) {
  fake().init_result = 5;
  const auto messages = run_ranks(1, [](Rank) {});
  EXPECT_SAYS(messages[0], "NCCL could not join 1 ranks: some error: what NCCL says");
}

TEST_F(NcclRanks, SayHowToShareAGpu) {
  fake().init_result = 5;
  fake().last_error = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000";
  const auto messages = run_ranks(1, [](Rank) {});
  fake().last_error = "what NCCL says";
  EXPECT_SAYS(messages[0], "Give each rank a GPU of its own");
}

// The first collective makes connections, so it blocks if a peer has gone.
TEST_F(NcclRanks, AbortACallThatBlocks) {
  left_behind_ = 1;
  const auto messages = run_ranks(
      1,
      [](Rank rank) {
        fake().collectives_hang = true;
        int mine = 0;
        rank.gather.announce("the all-gather of unit 'layers.0'", 0);
        const std::string message =
            message_of([&] { rank.gather.all_gather(rank.stream, &mine, &mine, sizeof(int)); });
        fake().collectives_hang = false;
        EXPECT_SAYS(message, "rank 0 of 1 waited 50 ms for the all-gather of unit 'layers.0'");
        EXPECT_SAYS(rank.gather.async_error(), "Communication was aborted");
        EXPECT_EQ(rank.reduce.async_error(), "");
        rank.gather.check();
      },
      milliseconds(50));
  EXPECT_SAYS(messages[0], "waited 50 ms for the all-gather of unit 'layers.0'");
}

TEST_F(NcclRanks, ATimeoutSaysWhatTheOtherRanksAreIn) {
  left_behind_ = 1;
  ask_others_ = [](const std::string& what) {
    return "When they failed, rank 0 was in " + what + ", rank 1 was in something else. ";
  };
  run_ranks(
      1,
      [](Rank rank) {
        fake().collectives_hang = true;
        int mine = 0;
        rank.gather.announce("the all-gather of unit 'layers.0'", 0);
        message_of([&] { rank.gather.all_gather(rank.stream, &mine, &mine, sizeof(int)); });
        fake().collectives_hang = false;
        EXPECT_SAYS(rank.gather.async_error(),
                    "rank 0 of 1 waited 50 ms for the all-gather of unit 'layers.0'. When they "
                    "failed, rank 0 was in the all-gather of unit 'layers.0', rank 1 was in "
                    "something else. Communication was aborted");
      },
      milliseconds(50));
}

// Note [flight records]
TEST_F(NcclRanks, WriteAFlightRecordBeforeTheyEndACollective) {
  left_behind_ = 1;
  fake().drain_calls();
  run_ranks(
      1,
      [](Rank rank) {
        std::size_t calls_before = 0;
        rank.gather.set_flight_writer([&calls_before] {
          calls_before = fake().drain_calls().size();
          return "It is in a file.";
        });
        fake().collectives_hang = true;
        int mine = 0;
        message_of([&] { rank.gather.all_gather(rank.stream, &mine, &mine, sizeof(int)); });
        fake().collectives_hang = false;
        EXPECT_SAYS(rank.gather.async_error(), "look at the output of all ranks. It is in a file.");
        const auto calls = fake().drain_calls();
        EXPECT_GT(calls_before, 0U);
        EXPECT_EQ(std::count(calls.begin(), calls.end(), "revoke"), 1);
      },
      milliseconds(50));
}

// Note [watchdog]
TEST_F(NcclRanks, AbortACallThatStillBlocksAfterItsCommunicatorIsRevoked) {
  fake().revoking_ends_calls = false;
  fake().drain_calls();
  const auto messages = run_ranks(
      1,
      [](Rank rank) {
        fake().collectives_hang = true;
        int mine = 0;
        rank.gather.announce("the all-gather of unit 'layers.0'", 0);
        rank.gather.all_gather(rank.stream, &mine, &mine, sizeof(int));
      },
      milliseconds(50));
  EXPECT_SAYS(messages[0], "rank 0 of 1 waited 50 ms for the all-gather of unit 'layers.0'");
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "revoke"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "abort"), 1);
}

// Revoking runs on a thread of its own, so the error is there all the same.
TEST_F(NcclRanks, FailInTimeIfRevokingHangs) {
  fake().revoking_hangs = true;
  left_behind_ = 1;
  run_ranks(
      1,
      [](Rank rank) {
        HostStream stream("gather", milliseconds(20000));
        std::promise<void> opened;
        stream.enqueue([future = opened.get_future().share()] { future.wait(); });
        int mine = 0;
        rank.gather.announce("the all-gather of unit 'first'", 0);
        rank.gather.all_gather(stream, &mine, &mine, sizeof(int));
        while (rank.gather.async_error().empty()) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        EXPECT_SAYS(message_of([&] { rank.gather.check(); }), "waited 50 ms for the all-gather");
        opened.set_value();
      },
      milliseconds(50));
  fake().revoking_hangs = false;
}

// The collective is launched, but its stream does not reach it. Only the watchdog notices.
TEST_F(NcclRanks, AbortACollectiveThatDoesNotEnd) {
  fake().can_revoke = false;  // as NCCL before 2.28.7, so the watchdog aborts
  run_ranks(
      1,
      [](Rank rank) {
        HostStream stream("gather", milliseconds(20000));
        std::promise<void> opened;
        stream.enqueue([future = opened.get_future().share()] { future.wait(); });
        int mine = 0;
        rank.gather.announce("the all-gather of unit 'first'", 0);
        rank.gather.all_gather(stream, &mine, &mine, sizeof(int));
        rank.gather.announce("the all-gather of unit 'second'", 0);
        rank.gather.all_gather(stream, &mine, &mine, sizeof(int));
        while (rank.gather.async_error().empty()) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        EXPECT_SAYS(rank.gather.async_error(), "waited 50 ms for the all-gather of unit 'first'");
        opened.set_value();
      },
      milliseconds(50));
}

TEST_F(NcclRanks, NoticeAnAsynchronousError) {
  left_behind_ = 2;
  run_ranks(
      1,
      [](Rank rank) {
        fake().async_error = 6;
        while (rank.gather.async_error().empty() || rank.reduce.async_error().empty()) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        EXPECT_SAYS(rank.gather.async_error(),
                    "NCCL reported an error of the gather communicator: some error");
      },
      milliseconds(200));
}

TEST_F(NcclRanks, LeaveAGroupInWhichACommunicatorFails) {
  left_behind_ = 1;
  const auto messages = run_ranks(1, [](Rank rank) {
    int mine = 0;
    rank.gather.group_start();
    rank.gather.all_gather(rank.stream, &mine, &mine, sizeof(int));
    rank.gather.abort("some reason");
    EXPECT_SAYS(message_of([&] { rank.gather.group_end(); }), "some reason");
    // Another communicator of the same thread goes on.
    float one = 1.0f;
    rank.reduce.all_reduce(rank.stream, &one, 1, DType::Float32);
    EXPECT_EQ(one, 1.0f);
  });
  EXPECT_EQ(messages[0], kNothingThrown);
}

TEST_F(NcclRanks, CloseEvenIfAPeerHasGone) {
  run_ranks(1, [](Rank) { fake().collectives_hang = true; }, milliseconds(50));
}

TEST_F(NcclRanks, RegisterBuffersAsTheVersionCan) {
  for (const char* kind : {"window", "register"}) {
    api_.version = kind == std::string("window") ? 22809 : 22707;
    fake().drain_calls();
    run_ranks(2, [](Rank rank) {
      const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
      EXPECT_NE(memory, nullptr);
    });
    const auto calls = fake().drain_calls();
    EXPECT_EQ(std::count(calls.begin(), calls.end(), kind), 2) << kind;
  }
}

TEST_F(NcclRanks, PassTheFlagsOfTheirVersion) {
  run_ranks(2, [](Rank rank) { rank.gather.allocate(rank.device, 64, BufferUse::Output); });
  EXPECT_EQ(fake().window_flags, nccl::kWindowDefault);
  api_.version = 23007;
  run_ranks(2, [](Rank rank) { rank.gather.allocate(rank.device, 64, BufferUse::Output); });
  EXPECT_EQ(fake().window_flags, nccl::kWindowCollSymmetric);
}

// See Note [order of windows].
TEST_F(NcclRanks, LetBuffersOutliveThem) {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> kept;
  run_ranks(2, [&](Rank rank) {
    const auto shard = rank.gather.allocate(rank.device, 4096, BufferUse::Shard);
    auto gradient = rank.gather.allocate(rank.device, 4096, BufferUse::Gradient);
    EXPECT_TRUE(rank.gather.is_registered(static_cast<char*>(shard.get()) + 4095));
    EXPECT_TRUE(rank.gather.is_registered(gradient.get()));
    EXPECT_FALSE(rank.reduce.is_registered(gradient.get()));
    const void* const freed = gradient.get();
    std::thread([&gradient] { gradient.reset(); }).join();
    EXPECT_FALSE(rank.gather.is_registered(freed));
    EXPECT_EQ(rank.gather.registered_buffers(), 2);  // until memory is planned again
    rank.gather.free_unused();
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
    const std::lock_guard<std::mutex> lock(mutex);
    kept.push_back(shard);
  });
  EXPECT_EQ(fake().registered_buffers, 0);
  EXPECT_EQ(fake().live_buffers, 2);
  EXPECT_EQ(fake().overlapping_windows, 0);
  kept.clear();
  EXPECT_EQ(fake().live_buffers, 0);
}

// It does not where no window is symmetric.
TEST_F(NcclRanks, FreeInputsAndOutputsAtOnceIfTheOrderDoesNotMatter) {
  run_ranks(2, [](Rank rank) {
    auto output = rank.gather.allocate(rank.device, 64, BufferUse::Output);
    auto shard = rank.gather.allocate(rank.device, 64, BufferUse::Shard);
    output.reset();
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
    shard.reset();
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
  });
  EXPECT_EQ(fake().live_buffers, 0);
}

// See Note [order of windows]. The fake counts windows whose offsets differ between ranks.
TEST_F(NcclRanks, FreeBuffersInOneOrder) {
  api_.version = 23007;
  run_ranks(2, [](Rank rank) {
    std::vector<std::shared_ptr<void>> buffers;
    const auto allocate = [&] {
      buffers.push_back(rank.gather.allocate(rank.device, 64, BufferUse::Output));
    };
    for (int i = 0; i < 4; ++i) {
      allocate();
    }
    // Each rank has one that the other still uses, and frees the rest in its own order.
    const bool is_first = rank.number == 0;
    for (const std::size_t freed : {is_first ? 0 : 3, is_first ? 1 : 2, is_first ? 2 : 1}) {
      buffers[freed].reset();
    }
    allocate();
    EXPECT_EQ(rank.gather.registered_buffers(), 3);  // those that a rank uses, and the new one
    allocate();
    buffers.erase(buffers.begin(), buffers.begin() + 4);
    allocate();
    EXPECT_EQ(rank.gather.registered_buffers(), 3);
  });
  EXPECT_EQ(fake().misplaced_windows, 0);
  EXPECT_EQ(fake().live_buffers, 0);
}

// Registering is collective, and in a step the ranks are not together.
TEST_F(NcclRanks, RegisterNothingWithinAStep) {
  run_ranks(2, [](Rank rank) {
    if (rank.number == 0) {
      EXPECT_NE(rank.gather.allocate_in_step(rank.device, 4096, BufferUse::Output), nullptr);
      EXPECT_EQ(rank.gather.registered_buffers(), 0);
    }
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "window"), 0);
}

// Torch may keep memory that it does not use.
TEST_F(NcclRanks, AllocateOnceMoreAfterOneFailure) {
  fake().allocations_to_fail = 1;
  const auto messages = run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

// The others would wait in the registration for ever.
TEST_F(NcclRanks, AllFailIfOneCannotAllocate) {
  fake().most_bytes = 4095;
  const auto messages = run_ranks(2, [](Rank rank) {
    rank.gather.allocate(rank.device, rank.number == 0 ? 4096 : 4095, BufferUse::Output);
  });
  fake().most_bytes = ~std::size_t{0};
  EXPECT_SAYS(messages[0], "NCCL could not allocate 4096 more bytes of GPU memory");
  EXPECT_SAYS(messages[1], "Another rank could not allocate 4095 more bytes of GPU memory");
}

TEST_F(NcclRanks, NoneUsesARegistrationThatFailsOnOne) {
  fake().register_fails_on_rank = 1;
  const auto messages = run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_NE(memory, nullptr);
    EXPECT_EQ(rank.gather.registered_buffers(), 0);
    rank.gather.barrier(rank.stream);
    EXPECT_EQ(fake().registered_buffers, 0);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

// Rank 0 fails in NCCL, and rank 1 waits there. Then both errors say what to set.
TEST_F(NcclRanks, SayHowToGoOnIfRegistrationFailsOnOneRankAlone) {
  fake().register_fails_on_rank = 0;
  fake().others_wait_for_failed = true;
  left_behind_ = 2;
  const auto messages = run_ranks(
      2, [](Rank rank) { rank.gather.allocate(rank.device, 4096, BufferUse::Output); },
      milliseconds(300));
  EXPECT_SAYS(messages[0],
              "rank 0 of 2 waited 300 ms for the registration of a buffer, in which NCCL failed "
              "(internal error: what NCCL says). ");
  EXPECT_SAYS(messages[1], "rank 1 of 2 waited 300 ms for the registration of a buffer. ");
  for (const std::string& message : messages) {
    EXPECT_SAYS(message,
                "look at the output of all ranks. If NCCL cannot register buffers on a "
                "rank, set FSDP_EXT_NCCL_REGISTER=0 on all ranks.");
  }
}

// NCCL makes such communicators if NCCL_COMM_BLOCKING=0 is in the environment.
TEST_F(NcclRanks, RegisterBuffersOfCommunicatorsThatNeverBlock) {
  fake().never_blocks = true;
  fake().polls_in_progress = 20;
  const auto messages = run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
    EXPECT_TRUE(rank.gather.is_registered(memory.get()));
    rank.gather.barrier(rank.stream);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

TEST_F(NcclRanks, UseTheDevicesMemoryWithoutRegistration) {
  run_ranks(
      2,
      [](Rank rank) {
        EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
      },
      milliseconds(20000), /*register_buffers=*/false);
  run_ranks(1, [](Rank rank) {
    EXPECT_NE(rank.gather.allocate(rank.device, 64, BufferUse::Output), nullptr);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "window"), 0);
}

// NCCL 2.29 and newer makes no windows between ranks that cannot read each other's memory.
TEST_F(NcclRanks, RegisterBuffersForTheNetworkWhereThereAreNoWindows) {
  fake().has_windows = false;
  run_ranks(2, [](Rank rank) {
    const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_EQ(rank.gather.registered_buffers(), 1);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "register"), 2);
}

// Each try would move shards and gradients to other memory.
TEST_F(NcclRanks, TryNoMoreAfterARegistrationHasFailed) {
  fake().register_result = 4;
  run_ranks(2, [](Rank rank) {
    EXPECT_TRUE(rank.gather.registers_buffers());
    const auto first = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    EXPECT_FALSE(rank.gather.registers_buffers());
    EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "window"), 2);
}

// A collective that NCCL has aborted without a word leaves what was in its buffer.
TEST_F(NcclRanks, NoticeAnExchangeThatHasNotRun) {
  left_behind_ = 2;
  const auto messages = run_ranks(2, [](Rank rank) {
    rank.gather.allocate(rank.device, 4096, BufferUse::Output);
    fake().gathers_nothing = true;
    rank.gather.allocate(rank.device, 4096, BufferUse::Output);
  });
  for (const std::string& message : messages) {
    EXPECT_SAYS(message,
                "the exchange of unused buffers has not reached all ranks, and NCCL "
                "reported no error. Set NCCL_DEBUG=WARN for more.");
  }
}

TEST_F(NcclRanks, UseBuffersWhoseRegistrationFails) {
  fake().register_result = 4;
  const auto messages = run_ranks(2, [](Rank rank) {
    EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

}  // namespace
}  // namespace fsdp
