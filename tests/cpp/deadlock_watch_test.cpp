// How ranks without shared memory find out that they wait for each other in different lanes. The
// tests write what ranks publish, and say when each rank looks.
#include "comm/liveness/deadlock_watch.h"

#include <gtest/gtest.h>

#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "message_of.h"
#include "published_lanes.h"

namespace fsdp::test {
namespace {

const std::string kNothing;
const std::string kAccount =
    "ranks 0 and 1 wait for each other, so neither can go on. Now rank 0 is in " +
    kLabels[kReduce] + ", rank 1 is in " + kLabels[kGather] +
    ". Run the same forwards and backwards in the same order on every rank.";

using Texts = std::map<std::string, std::string>;

class TextBoard final : public Board {
 public:
  explicit TextBoard(std::shared_ptr<Texts> texts) : texts_(std::move(texts)) {}

  void write(const std::string& place, const std::string& text) override {
    (*texts_)[place] = text;
  }
  std::string read(const std::string& place) override { return (*texts_)[place]; }

 private:
  std::shared_ptr<Texts> texts_;
};

class RanksApart : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank = 0; rank < 3; ++rank) {
      lanes_.push_back(std::make_shared<PublishedLanes>());
      ranks_.push_back(std::make_unique<DeadlockWatch>(std::make_unique<TextBoard>(texts_),
                                                       lanes_.back(), rank));
      for (int lane : {kGather, kReduce}) {  // so each lane knows the thread that issues
        begin(rank, lane);
        end(rank, lane);
      }
    }
  }

  Mailbox& of(int rank, int lane) { return lanes_[static_cast<std::size_t>(rank)]->lane(lane); }
  void begin(int rank, int lane) { publish_begin(of(rank, lane), lane); }
  void end(int rank, int lane) {
    of(rank, lane).activity.end();
    of(rank, lane).issuer.blocked = Issuer::kNobody;
  }
  void begin_and_block(int rank, int lane) {
    begin(rank, lane);
    publish_block(of(rank, lane));
  }

  std::string look(int rank) { return ranks_[static_cast<std::size_t>(rank)]->look(); }
  // What the rank says in any of some looks.
  std::string say(int rank) { return look(rank) + look(rank) + look(rank); }

  std::shared_ptr<Texts> texts_ = std::make_shared<Texts>();
  std::vector<std::shared_ptr<PublishedLanes>> lanes_;
  std::vector<std::unique_ptr<DeadlockWatch>> ranks_;
};

TEST_F(RanksApart, RanksThatWaitForEachOtherAreADeadlock) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  EXPECT_EQ(look(0), kNothing);
  EXPECT_EQ(look(0), kNothing) << "rank 1 has not looked twice";
  EXPECT_EQ(look(1), kNothing);
  EXPECT_EQ(look(1), kAccount);
  EXPECT_EQ(look(0), kAccount);
}

TEST_F(RanksApart, ARankThatWaitsForThemSaysTheSame) {
  begin_and_block(0, kReduce);
  begin_and_block(1, kGather);
  begin_and_block(2, kGather);
  say(0);
  say(1);
  EXPECT_EQ(look(2), kNothing);
  EXPECT_EQ(look(2), kAccount);
}

TEST_F(RanksApart, NobodyWritesWithoutALongWait) {
  begin(0, kReduce);  // the host computes
  begin_and_block(1, kGather);
  say(0);
  look(1);
  of(1, kReduce).issuer.issue();  // the lane has more to do
  look(1);
  EXPECT_EQ(texts_->count("stuck in gathers") + texts_->count("stuck in reductions"), 0U);
}

TEST_F(RanksApart, ARankWhoseHostIsNotBlockedMayStillGoOn) {
  begin_and_block(0, kReduce);
  begin(1, kGather);
  EXPECT_EQ(say(0) + say(1) + say(0), kNothing);
}

TEST_F(RanksApart, ARankWithSeveralThreadsMayStillGoOn) {
  begin_and_block(0, kReduce);
  std::thread([&] { of(1, kReduce).issuer.issue(); }).join();
  of(1, kReduce).activity.begin(kLabels[kReduce]);
  of(1, kReduce).activity.end();
  begin_and_block(1, kGather);
  EXPECT_EQ(of(1, kReduce).issuer.thread, Issuer::kSeveral);
  EXPECT_EQ(say(0) + say(1) + say(0), kNothing);
}

TEST_F(RanksApart, WhatARankWroteInAnEarlierWaitIsNoDeadlock) {
  begin_and_block(1, kGather);
  EXPECT_EQ(say(1), kNothing);
  begin(0, kGather);
  end(0, kGather);
  end(1, kGather);
  begin_and_block(0, kReduce);
  EXPECT_EQ(say(0), kNothing);
}

TEST_F(RanksApart, SomethingElseOnTheBoardIsIgnored) {
  (*texts_)["stuck in gathers"] = "something else";
  begin_and_block(0, kReduce);
  EXPECT_EQ(say(0), kNothing);
}

// Over NCCL.
TEST(RanksWithoutPublishedLanes, FindNothing) {
  EXPECT_EQ(DeadlockWatch(nullptr, nullptr, 0).look(), kNothing);
}

// - The thread

constexpr std::chrono::milliseconds kInterval{1};

// Fails at the first read, and has an account from the second one on.
class LateBoard final : public Board {
 public:
  void write(const std::string& /*place*/, const std::string& /*text*/) override {}
  std::string read(const std::string& /*place*/) override {
    FSDP_CHECK(++reads_ > 1, "the store does not answer");
    return kAccount;
  }

 private:
  int reads_ = 0;
};

TEST(DeadlockThread, ReportsWhatItFindsAlthoughTheBoardFailedBefore) {
  std::promise<std::string> reported;
  const auto lanes = std::make_shared<PublishedLanes>();
  DeadlockThread thread(std::make_unique<LateBoard>(), lanes, 0, kInterval);
  thread.start([&](const std::string& account) { reported.set_value(account); });
  publish_begin(lanes->lane(kGather), kGather);
  EXPECT_EQ(reported.get_future().get(), kAccount);
}

TEST(DeadlockThread, AReportThatThrowsEndsNoProcess) {
  std::promise<void> reported;
  const auto lanes = std::make_shared<PublishedLanes>();
  DeadlockThread thread(std::make_unique<LateBoard>(), lanes, 0, kInterval);
  thread.start([&](const std::string& /*account*/) {
    reported.set_value();
    throw Error("no wait could be ended");
  });
  publish_begin(lanes->lane(kGather), kGather);
  reported.get_future().get();
  thread.stop();
}

TEST(DeadlockThread, ReportsThatALaneHasFailed) {
  std::promise<std::string> reported;
  DeadlockThread thread(std::make_unique<LateBoard>(), std::make_shared<PublishedLanes>(), 0,
                        kInterval);
  thread.start([&](const std::string& reason) {
    thread.fail("ended by the other lane");  // the lane that this ends reports it in turn
    reported.set_value(reason);
  });
  thread.fail("the reason");
  EXPECT_EQ(reported.get_future().get(), "the reason");
}

TEST(DeadlockWatch, TellsNobodyWithoutABoard) {
  DeadlockWatch(nullptr, nullptr, 0).tell("the reason");
}

// Promises the first text that is written.
class PromisingBoard final : public Board {
 public:
  explicit PromisingBoard(std::promise<std::string> written) : written_(std::move(written)) {}

  void write(const std::string& /*place*/, const std::string& text) override {
    written_.set_value(text);
  }
  std::string read(const std::string& /*place*/) override { return ""; }

 private:
  std::promise<std::string> written_;
};

TEST(DeadlockThread, TellsOtherRanksTheReasonAfterItHasEndedItsLanes) {
  std::promise<std::string> written;
  std::future<std::string> told = written.get_future();
  std::atomic<bool> has_ended = false;
  DeadlockThread thread(std::make_unique<PromisingBoard>(std::move(written)),
                        std::make_shared<PublishedLanes>(), 0, kInterval);
  thread.start([&](const std::string& /*reason*/) { has_ended = true; });
  thread.fail("the reason", /*tells_others=*/true);
  EXPECT_EQ(told.get(), "the reason");
  EXPECT_TRUE(has_ended);
}

// Hangs until the test lets it go on.
class HangingBoard final : public Board {
 public:
  HangingBoard(std::promise<void> has_begun, std::future<void> goes_on,
               std::promise<void> has_ended)
      : has_begun_(std::move(has_begun)),
        goes_on_(std::move(goes_on)),
        has_ended_(std::move(has_ended)) {}
  ~HangingBoard() override { has_ended_.set_value(); }

  void write(const std::string& /*place*/, const std::string& /*text*/) override {}
  std::string read(const std::string& /*place*/) override {
    has_begun_.set_value();
    goes_on_.wait();
    return kAccount;
  }

 private:
  std::promise<void> has_begun_;
  std::future<void> goes_on_;
  std::promise<void> has_ended_;
};

TEST(DeadlockThread, EndsWithoutABoardThatHangs) {
  std::promise<void> has_begun;
  std::promise<void> goes_on;
  std::promise<void> has_ended;
  const std::future<void> begins = has_begun.get_future();
  const std::future<void> ends = has_ended.get_future();
  {
    const auto lanes = std::make_shared<PublishedLanes>();
    DeadlockThread thread(std::make_unique<HangingBoard>(std::move(has_begun), goes_on.get_future(),
                                                         std::move(has_ended)),
                          lanes, 0, kInterval);
    thread.start([](const std::string& account) { ADD_FAILURE() << "reported late: " << account; });
    publish_begin(lanes->lane(kGather), kGather);
    begins.wait();
  }
  goes_on.set_value();
  ends.wait();  // or the process would end while the thread still reads kAccount
}

}  // namespace
}  // namespace fsdp::test
