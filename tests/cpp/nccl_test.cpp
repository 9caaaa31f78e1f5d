// How ranks join, communicate, fail and close over a library that only looks like NCCL.
// nccl_buffers_test.cpp has the tests of their buffers.
#include "comm/nccl/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "nccl_ranks.h"

namespace fsdp {
namespace {

using test::fake;
using test::kNothingThrown;
using test::message_of;
using test::NcclRanks;
using test::wait_for_error;

using std::chrono::milliseconds;

const std::string kLayer = "the all-gather of unit 'layers.0'";
const std::string kFirst = "the all-gather of unit 'first'";
const std::string kSecond = "the all-gather of unit 'second'";

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
    ASSERT_EQ(rank.gather.traits().gather_by, GatherBy::Size);
    rank.gather.all_gather_parts(rank.stream,
                                 {{&mine[0], first, sizeof(int)}, {&mine[1], second, sizeof(int)}});
    EXPECT_EQ(first[1], 1);
    EXPECT_EQ(second[1], 11);
  });
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "group of 2"), 2);
}

// Note [blocking communicators]
TEST_F(NcclRanks, JoinWithoutBlockingAndThenBlock) {
  run_ranks(1, [](Rank) {});
  const std::vector<std::string> calls = fake().drain_calls();
  ASSERT_EQ(calls.size(), 9U);
  EXPECT_EQ(
      std::vector<std::string>(calls.begin(), calls.begin() + 5),
      (std::vector<std::string>{"non-blocking init", "split", "split", "finalize", "destroy"}));
  EXPECT_EQ(std::count(calls.begin() + 5, calls.end(), "destroy"), 2);
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
  EXPECT_EQ(gather.version, 22809U);
  EXPECT_EQ(gather.cta_policy, 1);
  EXPECT_EQ(gather.cga_cluster_size, 2);
  EXPECT_EQ(gather.max_ctas, nccl::kUndefined);
  const nccl::Config& reduce = fake().splits[1];
  EXPECT_EQ(reduce.min_ctas, 2);
  EXPECT_EQ(reduce.max_ctas, 8);
  EXPECT_EQ(reduce.cta_policy, nccl::kUndefined);
}

// NCCL refuses a least number of thread blocks without a most.
TEST_F(NcclRanks, GiveALeastNumberOfThreadBlocksAMost) {
  fake().splits.clear();
  nccl::LaneSettings gathers;
  gathers.min_ctas = 4;
  run_ranks(1, [](Rank) {}, milliseconds(20000), true, gathers, {});
  ASSERT_EQ(fake().splits.size(), 2U);
  EXPECT_EQ(fake().splits[0].min_ctas, 4);
  EXPECT_EQ(fake().splits[0].max_ctas, 64);
  EXPECT_EQ(fake().splits[1].max_ctas, nccl::kUndefined);
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
        rank.gather.announce(kLayer, 0);
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
        rank.gather.announce(kLayer, 0);
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
  left_behind_ = 1;
  fake().drain_calls();
  const auto messages = run_ranks(
      1,
      [](Rank rank) {
        fake().collectives_hang = true;
        int mine = 0;
        rank.gather.announce(kLayer, 0);
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
        test::BlockedStream blocked;
        int mine = 0;
        rank.gather.announce(kFirst, 0);
        rank.gather.all_gather(blocked.stream, &mine, &mine, sizeof(int));
        wait_for_error(rank.gather);
        EXPECT_SAYS(message_of([&] { rank.gather.check(); }), "waited 50 ms for the all-gather");
        blocked.open();
      },
      milliseconds(50));
  fake().revoking_hangs = false;
}

// The collective is launched, but its stream does not reach it. Only the watchdog notices.
TEST_F(NcclRanks, AbortACollectiveThatDoesNotEnd) {
  fake().can_revoke = false;  // so the watchdog aborts
  run_ranks(
      1,
      [](Rank rank) {
        test::BlockedStream blocked;
        int mine = 0;
        rank.gather.announce(kFirst, 0);
        rank.gather.all_gather(blocked.stream, &mine, &mine, sizeof(int));
        rank.gather.announce(kSecond, 0);
        rank.gather.all_gather(blocked.stream, &mine, &mine, sizeof(int));
        wait_for_error(rank.gather);
        EXPECT_SAYS(rank.gather.async_error(), "waited 50 ms for the all-gather of unit 'first'");
        blocked.open();
      },
      milliseconds(50));
}

TEST_F(NcclRanks, NoticeAnAsynchronousError) {
  left_behind_ = 2;
  fake().drain_calls();
  run_ranks(
      1,
      [](Rank rank) {
        fake().async_error = 6;
        wait_for_error(rank.gather);
        wait_for_error(rank.reduce);
        EXPECT_SAYS(rank.gather.async_error(),
                    "NCCL reported an error of the gather communicator: some error");
      },
      milliseconds(200));
  const auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "revoke"), 2);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "abort"), 0);  // no call blocks
}

// Its collectives may wait for ranks that have given up.
TEST_F(NcclRanks, EndTheOtherLaneOnceOneHasFailed) {
  ends_both_lanes_ = true;
  left_behind_ = 2;
  run_ranks(1, [](Rank rank) {
    rank.gather.abort("some reason");
    wait_for_error(rank.reduce);
    EXPECT_EQ(rank.reduce.async_error(), "some reason");
  });
}

TEST_F(NcclRanks, LeaveAGroupInWhichACommunicatorFails) {
  left_behind_ = 1;
  const auto messages = run_ranks(1, [](Rank rank) {
    int mine = 0;
    fake().before_gather = [&rank] { rank.gather.abort("some reason"); };
    const GatherPart part{&mine, &mine, sizeof(int)};
    EXPECT_SAYS(message_of([&] { rank.gather.all_gather_parts(rank.stream, {part, part}); }),
                "some reason");
    fake().before_gather = nullptr;
    // Another communicator of the same thread goes on.
    float one = 1.0f;
    rank.reduce.all_reduce(rank.stream, &one, 1, DType::Float32);
    EXPECT_EQ(one, 1.0f);
  });
  EXPECT_EQ(messages[0], kNothingThrown);
}

TEST_F(NcclRanks, CloseEvenIfAPeerHasGone) {
  ::testing::internal::CaptureStderr();
  fake().before_finalize = [] { std::fputs("closes a lane\n", stderr); };
  run_ranks(1, [](Rank) { fake().collectives_hang = true; }, milliseconds(500));
  fake().before_finalize = nullptr;
  const std::string printed = ::testing::internal::GetCapturedStderr();
  // Both lanes are closed at once, while a peer that is late may still come.
  EXPECT_LT(printed.rfind("closes a lane"), printed.find("waited 500 ms")) << printed;
  for (const char* lane : {"gather", "reduce"}) {
    EXPECT_SAYS(printed, std::string("rank 0 waited 500 ms for all ranks to close the ") + lane +
                             " communicator and went on without them. Some rank has not closed it "
                             "yet, or has failed.");
  }
}

}  // namespace
}  // namespace fsdp
