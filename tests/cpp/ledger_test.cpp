// Times of the ledger: which iterations are kept, spans, and moments in order.
#include "core/record/ledger.h"

#include <gtest/gtest.h>

#include <thread>

#include "device/host_clock.h"
#include "device/host_stream.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

class LedgerTimes : public ::testing::Test {
 protected:
  LedgerTimes() : device_(make_host_device(milliseconds(20000))), ledger_(*device_) {
    lane_ = device_->new_stream("lane");
  }

  Stream& compute() { return device_->compute_stream(); }
  void enqueue(Stream& stream, std::function<void()> work) {
    static_cast<HostQueue&>(stream).enqueue(std::move(work));
  }

  std::unique_ptr<Device> device_;
  Ledger ledger_;
  std::unique_ptr<Stream> lane_;
};

TEST_F(LedgerTimes, NothingIsRecordedByDefault) {
  ledger_.begin_iteration();
  EXPECT_FALSE(ledger_.has_times());
  EXPECT_EQ(ledger_.mark_compute(), WorkSpan::kNever);
  {
    const Timed timed(ledger_, *lane_, Work::Gather, {1, 1});
  }
  EXPECT_TRUE(ledger_.take_times().empty());
}

TEST_F(LedgerTimes, ASpanLastsAsLongAsTheWorkOfItsStream) {
  ledger_.keep_times(2, 8, /*drained=*/true);
  ledger_.begin_iteration();
  ledger_.begin_pass(Phase::Backward, Work::Backward);
  const Issue issue{host_clock::now(), 0, WorkSpan::kNever, true};
  {
    const Timed timed(ledger_, *lane_, Work::Reduce, {2, 4}, {100, issue}, false);
    enqueue(*lane_, [] { std::this_thread::sleep_for(milliseconds(5)); });
  }
  lane_->synchronize();
  const std::vector<IterationTimes> iterations = ledger_.take_times();
  ASSERT_EQ(iterations.size(), 1U);
  ASSERT_EQ(iterations[0].spans.size(), 2U);  // the first one is the pass
  const TimedSpan& timed = iterations[0].spans[1];
  EXPECT_EQ(timed.span.work, Work::Reduce);
  EXPECT_EQ(timed.span.phase, Phase::Backward);
  EXPECT_EQ(timed.span.units.first, 2);
  EXPECT_EQ(timed.span.units.last, 4);
  EXPECT_EQ(timed.collective.bytes, 100U);
  EXPECT_TRUE(timed.collective.issue.on_demand);
  EXPECT_GE(timed.end - timed.begin, 5e-3);
  EXPECT_GE(timed.begin, timed.issued);
  EXPECT_GT(timed.issued, 0.0);
  EXPECT_EQ(timed.refused, 0.0);
  EXPECT_EQ(timed.possible, 0.0);
}

TEST_F(LedgerTimes, AStepIsRecordedUnlessAnIterationBeginsInside) {
  ledger_.begin_step();
  ledger_.end_step();  // no times are kept
  ledger_.keep_times(2, 8, /*drained=*/true);
  ledger_.begin_iteration();
  ledger_.begin_step();
  std::this_thread::sleep_for(milliseconds(5));
  ledger_.end_step();
  ledger_.end_step();  // as an outer step(), which the inner one has ended
  ledger_.begin_step();
  ledger_.begin_iteration();
  ledger_.end_step();
  const std::vector<IterationTimes> iterations = ledger_.take_times();
  ASSERT_EQ(iterations.size(), 2U);
  EXPECT_TRUE(iterations[1].spans.empty());
  ASSERT_EQ(iterations[0].spans.size(), 1U);
  const TimedSpan& step = iterations[0].spans[0];
  EXPECT_EQ(step.span.work, Work::Step);
  EXPECT_EQ(step.span.units.first, kAllUnits.first);
  EXPECT_GE(step.end - step.begin, 5e-3);
}

TEST_F(LedgerTimes, MomentsOfAStreamComeInItsOrder) {
  ledger_.keep_times(1, 8, /*drained=*/true);
  ledger_.begin_iteration();
  const IterationIndex held = ledger_.open(*lane_, Work::Forward, kAllUnits);
  IterationIndex open = held;
  for (int i = 0; i < 100; ++i) {
    const Timed timed(ledger_, *lane_, Work::Gather, {i, i});
    if (i % 3 == 0) {
      enqueue(*lane_, [] {});
    }
    if (i % 7 == 0) {  // an event between the spans
      const std::unique_ptr<Event> event = device_->new_event();
      lane_->record(*event);
    }
  }
  ledger_.close(open, *lane_);
  EXPECT_EQ(open.number, WorkSpan::kNever);
  lane_->synchronize();
  const std::vector<TimedSpan> spans = ledger_.take_times().at(0).spans;
  ASSERT_EQ(spans.size(), 101U);
  for (std::size_t i = 2; i < spans.size(); ++i) {
    EXPECT_LE(spans[i - 1].end, spans[i].begin);
  }
  EXPECT_LE(spans[0].begin, spans[1].begin);
  EXPECT_GE(spans[0].end, spans[100].end);
}

TEST_F(LedgerTimes, TheLastIterationsAreKeptInOrder) {
  ledger_.keep_times(3, 8, /*drained=*/true);
  for (int i = 0; i < 8; ++i) {
    ledger_.begin_iteration();
    const Timed timed(ledger_, compute(), Work::UnitForward, {i, i});
  }
  EXPECT_EQ(ledger_.lost_iterations(), 5U);
  const std::vector<IterationTimes> iterations = ledger_.take_times();
  ASSERT_EQ(iterations.size(), 3U);
  for (int i = 0; i < 3; ++i) {
    const IterationTimes& iteration = iterations[static_cast<std::size_t>(i)];
    EXPECT_EQ(iteration.number, static_cast<std::uint64_t>(6 + i));
    EXPECT_EQ(iteration.spans.at(0).span.units.first, 5 + i);
  }
  EXPECT_EQ(ledger_.lost_iterations(), 0U);
}

TEST_F(LedgerTimes, ASpanThatIsClosedInAnotherIterationNeverEnds) {
  ledger_.keep_times(2, 8, /*drained=*/true);
  ledger_.begin_iteration();
  IterationIndex open = ledger_.open(compute(), Work::UnitBackward, {1, 1});
  const IterationIndex before = ledger_.last_compute_moment();
  EXPECT_EQ(ledger_.number_of(before), 0);
  ledger_.begin_iteration();
  EXPECT_EQ(ledger_.number_of(before), WorkSpan::kNever);
  ledger_.close(open, compute());
  const std::vector<IterationTimes> iterations = ledger_.take_times();
  EXPECT_EQ(iterations.at(0).spans.at(0).end, 0.0);
  EXPECT_TRUE(iterations.at(1).spans.empty());
}

TEST_F(LedgerTimes, MemoryThatAStreamStillWritesStaysAllocated) {
  ledger_.keep_times(1, 8, /*drained=*/true);
  ledger_.begin_iteration();
  enqueue(*lane_, [] { std::this_thread::sleep_for(milliseconds(20)); });
  {
    const Timed timed(ledger_, *lane_, Work::Gather, {0, 0});
    enqueue(*lane_, [] {});
  }
  const std::unique_ptr<Event> event = device_->new_event();
  lane_->record(*event);
  ledger_.keep_times(0, 0, /*drained=*/false);
  lane_->synchronize();  // AddressSanitizer checks the memory that it writes
  EXPECT_TRUE(ledger_.take_times().empty());
}

TEST_F(LedgerTimes, TheEarliestIssueTimeIsAMomentOfTheComputeStream) {
  ledger_.keep_times(1, 8, /*drained=*/true);
  ledger_.begin_iteration();
  Issue issue;
  issue.possible = ledger_.mark_compute();
  {
    const Timed timed(ledger_, *lane_, Work::Gather, {0, 0}, {1, issue}, false);
  }
  lane_->synchronize();
  const TimedSpan timed = ledger_.take_times().at(0).spans.at(0);
  EXPECT_GT(timed.possible, 0.0);
  EXPECT_LE(timed.possible, timed.begin);
}

TEST_F(LedgerTimes, WorkThatThrowsIsTimedLikeOther) {
  ledger_.keep_times(1, 8, /*drained=*/true);
  ledger_.begin_iteration();
  {
    const Timed timed(ledger_, *lane_, Work::Gather, {0, 0});
    enqueue(*lane_, [] { throw std::runtime_error("planted"); });
  }
  EXPECT_THROW(lane_->synchronize(), std::runtime_error);
  const TimedSpan timed = ledger_.take_times().at(0).spans.at(0);
  EXPECT_GT(timed.begin, 0.0);
  EXPECT_GE(timed.end, timed.begin);
}

}  // namespace
}  // namespace fsdp::test
