// csrc/comm/nccl* over a library that only looks like NCCL (fake_nccl.h).
#include "comm/nccl.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <future>
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
constexpr const char* kOtherLibrary = OTHER_FAKE_NCCL_LIBRARY;

test::FakeNccl& fake() {
  static void* const handle = dlopen(kLibrary, RTLD_NOW);
  return *reinterpret_cast<test::FakeNcclFunction*>(dlsym(handle, "fake_nccl"))();
}

#define EXPECT_SAYS(text, part) EXPECT_TRUE(contains(text, part)) << (text)

// - The library

class NcclLibrary : public ::testing::Test {
 protected:
  void SetUp() override { setenv("FSDP_EXT_NCCL_SO", kLibrary, 1); }
  void TearDown() override {
    fake().version = 22809;
    unsetenv("FSDP_EXT_NCCL_SO");
  }
};

TEST_F(NcclLibrary, IsTheOneThatTheVariableNames) {
  const nccl::Api api = nccl::find_library({});
  EXPECT_EQ(api.version_text(), "2.28.9");
  EXPECT_EQ(api.path, kLibrary);
}

TEST_F(NcclLibrary, IsTheLoadedOneWithoutTheVariable) {
  fake();
  unsetenv("FSDP_EXT_NCCL_SO");
  EXPECT_EQ(nccl::find_library({"/nowhere/libnccl.so.2"}).path, kLibrary);
}

TEST_F(NcclLibrary, IsRefusedIfItDoesNotExist) {
  setenv("FSDP_EXT_NCCL_SO", "/nowhere/libnccl.so.2", 1);
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }),
              "FSDP_EXT_NCCL_SO='/nowhere/libnccl.so.2' is not a library that can be loaded");
}

TEST_F(NcclLibrary, IsRefusedIfItIsNotNccl) {
  setenv("FSDP_EXT_NCCL_SO", "libm.so.6", 1);
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }), "has no ncclGetVersion that works");
}

TEST_F(NcclLibrary, IsRefusedIfItIsTooOld) {
  fake().version = 21700;
  EXPECT_SAYS(message_of([] { nccl::find_library({}); }),
              "is NCCL 2.17.0, but fsdp_ext needs 2.18 or newer");
}

TEST_F(NcclLibrary, IsRefusedIfTheProcessHasTwo) {
  void* const other = dlopen(kOtherLibrary, RTLD_NOW);
  ASSERT_NE(other, nullptr);
  const std::string message = message_of([] { nccl::find_library({}); });
  dlclose(other);
  EXPECT_SAYS(message, "The process has loaded 2 NCCL libraries");
  EXPECT_SAYS(message, kLibrary);
  EXPECT_SAYS(message, kOtherLibrary);
}

TEST_F(NcclLibrary, RegistersBuffersAsItsVersionCan) {
  EXPECT_STREQ(nccl::find_library({}).registration(), "window");
  fake().version = 22600;
  EXPECT_STREQ(nccl::find_library({}).registration(), "register");
}

// - The communicators

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
  }

  struct Rank {
    int number;
    Device& device;
    Communicator& gather;
    Communicator& reduce;
    Stream& stream;  // the calling thread
  };

  // Runs `body` on a thread per rank and returns the message of each.
  std::vector<std::string> run_ranks(int size, const std::function<void(Rank)>& body,
                                     milliseconds timeout = milliseconds(20000),
                                     bool register_buffers = true) {
    nccl::UniqueId id;
    api_.GetUniqueId(&id);
    std::vector<std::future<std::string>> ranks;
    for (int r = 0; r < size; ++r) {
      ranks.push_back(std::async(std::launch::async, [=] {
        return message_of([&] {
          const auto device = make_host_device(milliseconds(20000));
          const auto [gather, reduce] =
              make_nccl_communicators(api_, *device, id, {r, size, timeout, register_buffers});
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

// The collective is launched, but its stream does not reach it. Only the watchdog notices.
TEST_F(NcclRanks, AbortACollectiveThatDoesNotEnd) {
  fake().can_revoke = false;  // as NCCL before 2.28, so the watchdog aborts
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
    api_.version = kind == std::string("window") ? 22809 : 22600;
    fake().drain_calls();
    run_ranks(2, [](Rank rank) {
      const auto memory = rank.gather.allocate(rank.device, 4096, BufferUse::Output);
      EXPECT_NE(memory, nullptr);
    });
    const auto calls = fake().drain_calls();
    EXPECT_EQ(std::count(calls.begin(), calls.end(), kind), 2) << kind;
  }
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

TEST_F(NcclRanks, UseBuffersWhoseRegistrationFails) {
  fake().register_result = 4;
  const auto messages = run_ranks(2, [](Rank rank) {
    EXPECT_NE(rank.gather.allocate(rank.device, 4096, BufferUse::Output), nullptr);
  });
  EXPECT_EQ(messages, (std::vector<std::string>(2, kNothingThrown)));
}

}  // namespace
}  // namespace fsdp
