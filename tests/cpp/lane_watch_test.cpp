// When ranks that wait in different lanes are a deadlock, and when one may still go on. The tests
// write what ranks publish, and say what time it is.
#include "comm/liveness/lane_watch.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "comm/shared_memory/shared_arena.h"
#include "message_of.h"
#include "published_lanes.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kUnchanged{1000};
const std::string kAccount =
    "ranks 0 and 1 wait for each other, so neither can go on. Now rank 0 is in " +
    kLabels[kReduce] + ", rank 1 is in " + kLabels[kGather] +
    ". Run the same forwards and backwards in the same order on every rank.";

class TwoLanes : public ::testing::Test {
 protected:
  void SetUp() override { add_ranks(2); }

  void add_ranks(int ranks) {
    const auto arena = Arena::of_this_process();
    const PeerMemory memory{nullptr, arena->base(), arena->address().bytes, "a rank"};
    for (int r = 0; r < ranks; ++r) {
      PeerAddress address{arena->address(), {}, static_cast<std::int64_t>(peers_.size())};
      for (int lane : {kGather, kReduce}) {
        memory_.push_back(Arena::allocate(arena, sizeof(Mailbox)));
        new (memory_.back().get()) Mailbox;
        address.mailboxes[lane] = arena->offset_of(memory_.back().get());
      }
      peers_.emplace_back(address, memory, kGather);
    }
    for (std::size_t rank = peers_.size() - static_cast<std::size_t>(ranks); rank < peers_.size();
         ++rank) {
      for (int lane : {kGather, kReduce}) {  // so each lane knows the thread that issues
        begin(rank, lane);
        of(rank, lane).activity.end();
      }
    }
  }

  Mailbox& of(std::size_t rank, int lane) {
    return *static_cast<Mailbox*>(memory_[2 * rank + static_cast<std::size_t>(lane)].get());
  }

  void begin(std::size_t rank, int lane) { publish_begin(of(rank, lane), lane); }
  void block(std::size_t rank, int lane) { publish_block(of(rank, lane)); }

  void begin_and_block(std::size_t rank, int lane) {
    begin(rank, lane);
    block(rank, lane);
  }

  // What the watch says after so many milliseconds.
  std::string look(int at) {
    return message_of([&] { watch_->look(LaneWatch::Time(milliseconds(at))); });
  }

  // The same after long observation.
  std::string say() {
    look(0);
    look(50);
    return look(1'000'000);
  }

  std::vector<std::shared_ptr<void>> memory_;
  std::vector<Peer> peers_;
  std::unique_ptr<LaneWatch> watch_ = std::make_unique<LaneWatch>(peers_, kUnchanged);
};

TEST_F(TwoLanes, RanksThatWaitForEachOtherAreADeadlock) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  EXPECT_EQ(look(0), kNothingThrown);
  EXPECT_EQ(look(999), kNothingThrown);
  EXPECT_EQ(look(1000), kAccount);
}

TEST_F(TwoLanes, ARankThatHasReducedNothingYetMayBeInADeadlock) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  of(1, kReduce).issuer.thread = Issuer::kNobody;
  EXPECT_EQ(say(), kAccount);
}

TEST_F(TwoLanes, OneObservationIsNotEnough) {
  watch_ = std::make_unique<LaneWatch>(peers_, milliseconds(0));
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  EXPECT_EQ(look(0), kNothingThrown);
  EXPECT_EQ(look(1), kAccount);
}

TEST_F(TwoLanes, AChangeBeginsTheTimeAnew) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  look(0);
  of(1, kReduce).issuer.issue();  // an early read of it, before the lane runs it
  EXPECT_EQ(look(900), kNothingThrown);
  of(1, kReduce).activity.begin(kLabels[kReduce]);
  of(1, kReduce).activity.end();
  EXPECT_EQ(look(1100), kNothingThrown);
  EXPECT_EQ(look(2099), kNothingThrown);
  EXPECT_EQ(look(2100), kAccount);
}

TEST_F(TwoLanes, ARankWhoseHostIsNotBlockedMayStillGoOn) {
  begin_and_block(0, kReduce);
  begin(1, kGather);  // and computes, or sleeps
  EXPECT_EQ(say(), kNothingThrown);
  of(1, kReduce).issuer.blocked = this_thread();  // waits for something else
  EXPECT_EQ(say(), kNothingThrown);
}

TEST_F(TwoLanes, ARankWithQueuedWorkMayStillGoOn) {
  begin_and_block(0, kReduce);
  begin(1, kGather);
  of(1, kReduce).issuer.issue();
  block(1, kGather);
  EXPECT_EQ(say(), kNothingThrown);
}

TEST_F(TwoLanes, ARankThatIsLateInOneLaneOnlyMayStillGoOn) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  of(0, kGather).posted += 1;  // rank 0 took part in rank 1's all-gather, which ends soon
  EXPECT_EQ(say(), kNothingThrown);
}

TEST_F(TwoLanes, ARankWithSeveralThreadsMayStillGoOn) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  of(1, kGather).issuer.blocked = 2;  // a thread that issues nothing
  EXPECT_EQ(say(), kNothingThrown);
  block(1, kGather);
  std::thread([&] {
    of(1, kReduce).issuer.issue();
    of(1, kReduce).activity.begin(kLabels[kReduce]);
    of(1, kReduce).activity.end();
  }).join();
  EXPECT_EQ(of(1, kReduce).issuer.thread, Issuer::kSeveral);
  EXPECT_EQ(say(), kNothingThrown);
}

// Rank 3 waits, too, and rank 2 computes.
TEST_F(TwoLanes, RanksThatWaitForThoseInADeadlockSayTheSame) {
  add_ranks(2);
  begin_and_block(3, kGather);
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  const std::string message = say();
  EXPECT_TRUE(contains(message, "ranks 0 and 1 wait for each other")) << message;
  EXPECT_TRUE(contains(message, "rank 2 is in no collective, rank 3 is in " + kLabels[kGather]))
      << message;
}

TEST_F(TwoLanes, ARankThatFailedInEitherLaneEndsAWaitThatDoesNotGoOn) {
  for (int lane : {kGather, kReduce}) {
    Mailbox& mailbox = of(1, lane);
    std::string("rank 1: the first error").copy(mailbox.reason, sizeof(mailbox.reason));
    mailbox.state = Mailbox::State::Failed;
    watch_ = std::make_unique<LaneWatch>(peers_, kUnchanged);
    EXPECT_EQ(look(0), kNothingThrown);
    EXPECT_EQ(look(999), kNothingThrown) << "what is in flight may end first";
    EXPECT_EQ(look(1000), "rank 1: the first error");
    mailbox.state = Mailbox::State::Active;
  }
}

TEST_F(TwoLanes, TheFirstRankThatRaisesEndsADeadlockOnTheOthersAtOnce) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  EXPECT_EQ(look(0), kNothingThrown);
  of(1, kGather).issuer.blocked = Issuer::kNobody;
  std::string("the account of rank 1").copy(of(1, kGather).reason, 1000);
  of(1, kGather).state = Mailbox::State::Failed;
  EXPECT_EQ(look(50), "the account of rank 1");
}

}  // namespace
}  // namespace fsdp::test
