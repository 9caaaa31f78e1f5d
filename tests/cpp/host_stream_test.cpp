// Streams of the host: order, events, errors, timeouts, lifetimes. No test depends on how long
// anything takes: a Gate blocks a stream for as long as a test needs.
#include "device/host_stream.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "message_of.h"

namespace fsdp {
namespace {

using std::chrono::milliseconds;
using test::contains;
using test::message_of;

constexpr milliseconds kLong{60000};  // never reached if the code is right
constexpr milliseconds kShort{50};
const std::string kWork = "the work before";

// Work that blocks its stream until open().
class Gate {
 public:
  ~Gate() { open(); }

  void open() {
    if (!opened_) {
      opened_ = true;
      promise_.set_value();
    }
  }

  std::function<void()> work() {
    return [future = future_] { future.wait(); };
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
  bool opened_ = false;
};

class HostStreams : public ::testing::Test {
 protected:
  std::unique_ptr<HostStream> make_stream(const std::string& name, milliseconds timeout = kLong) {
    return std::make_unique<HostStream>(name, timeout);
  }

  Gate gate_;
  Gate second_gate_;
  HostEvent event_;
  InlineStream compute_{kLong};
  std::unique_ptr<HostStream> a_ = make_stream("a");
  std::unique_ptr<HostStream> b_ = make_stream("b");

  // Streams join their threads in their destructors, so the gates must be open before.
  void TearDown() override {
    gate_.open();
    second_gate_.open();
  }
};

// - Published waits

TEST_F(HostStreams, AHostThatIsBlockedIsPublishedUntilTheStreamIsDone) {
  BlockedThread blocked{0};
  a_->publish_waits(blocked);
  a_->enqueue(gate_.work());
  a_->record(event_);
  b_->wait(event_, kWork);
  b_->enqueue(second_gate_.work());
  EXPECT_THROW(event_.synchronize(kShort, kWork), TimeoutError);
  EXPECT_EQ(blocked, 0U) << "neither the wait that has ended nor a worker's is published";
  std::uint64_t waiter = 0;
  std::thread host([&] {
    waiter = this_thread();
    event_.synchronize(kLong, kWork);
  });
  while (blocked == 0) {
    std::this_thread::yield();
  }
  const std::uint64_t published = blocked;
  gate_.open();
  HostEvent next;
  a_->record(next);
  next.synchronize(kLong, kWork);
  EXPECT_EQ(blocked, 0U) << "whether or not the host has woken";
  host.join();
  EXPECT_EQ(published, waiter);
}

// - Order

TEST_F(HostStreams, WorkRunsInTheOrderOfIssue) {
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) {
    a_->enqueue([&order, i] { order.push_back(i); });
  }
  a_->synchronize();
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST_F(HostStreams, StreamsThatDoNotWaitForEachOtherDoNotBlock) {
  a_->enqueue(gate_.work());
  a_->record(event_);
  int value = 0;
  b_->enqueue([&] { value = 1; });
  b_->synchronize();
  EXPECT_EQ(value, 1);
  EXPECT_FALSE(event_.query());
}

TEST_F(HostStreams, AWaitOrdersTheWorkOfTwoStreams) {
  int value = 0;
  int seen = 0;
  a_->enqueue(gate_.work());
  a_->enqueue([&] { value = 7; });
  a_->record(event_);
  b_->wait(event_, kWork);
  b_->enqueue([&] { seen = value; });
  HostEvent done;
  b_->record(done);
  EXPECT_FALSE(done.query());
  gate_.open();
  done.synchronize(kLong, kWork);
  EXPECT_EQ(seen, 7);
}

TEST_F(HostStreams, TheComputeStreamRunsWorkAtOnceAndBlocksOnWaits) {
  int value = 0;
  const auto here = std::this_thread::get_id();
  compute_.enqueue([&] { value = std::this_thread::get_id() == here ? 1 : -1; });
  EXPECT_EQ(value, 1);
  a_->enqueue([&] { value = 2; });
  a_->record(event_);
  compute_.wait(event_, kWork);
  EXPECT_EQ(value, 2);
}

TEST_F(HostStreams, ADelayedStreamIsStillWaitedFor) {
  const std::unique_ptr<Device> device = make_host_device(kLong);
  int value = 0;
  device->delay(*a_, std::chrono::microseconds(2000));
  a_->enqueue([&] { value = 3; });
  a_->record(event_);
  device->compute_stream().wait(event_, kWork);
  EXPECT_EQ(value, 3);
}

// - Events

TEST_F(HostStreams, AnEventNeverRecordedIsComplete) {
  EXPECT_TRUE(event_.query());
  event_.synchronize(kShort, kWork);
  compute_.wait(event_, kWork);
  a_->wait(event_, kWork);
  a_->synchronize();
}

TEST_F(HostStreams, AnEventCompletesAfterTheWorkBeforeItOnly) {
  a_->enqueue(gate_.work());
  a_->record(event_);
  a_->enqueue(second_gate_.work());
  EXPECT_FALSE(event_.query());
  gate_.open();
  event_.synchronize(kLong, kWork);
  EXPECT_TRUE(event_.query());
}

TEST_F(HostStreams, AWaitIsForTheRecordThatWasNewestWhenItWasIssued) {
  HostEvent early_done;
  HostEvent late_done;
  const auto late = make_stream("late");
  a_->enqueue(gate_.work());
  a_->record(event_);
  b_->wait(event_, kWork);
  b_->record(early_done);
  a_->enqueue(second_gate_.work());
  a_->record(event_);
  late->wait(event_, kWork);
  late->record(late_done);
  EXPECT_FALSE(early_done.query());

  gate_.open();
  early_done.synchronize(kLong, kWork);
  EXPECT_FALSE(event_.query());
  EXPECT_FALSE(late_done.query());
  second_gate_.open();
  late_done.synchronize(kLong, kWork);
  EXPECT_TRUE(event_.query());
}

TEST_F(HostStreams, ARecordOnAnotherStreamNeitherReleasesNorDelaysEarlierWaiters) {
  HostEvent done;
  const auto waiter = make_stream("waiter");
  a_->enqueue(gate_.work());
  a_->record(event_);
  waiter->wait(event_, kWork);
  waiter->record(done);

  b_->record(event_);
  event_.synchronize(kLong, kWork);  // the newest record; stream a's record is still pending
  EXPECT_FALSE(done.query());
  compute_.record(event_);
  EXPECT_TRUE(event_.query());
  EXPECT_FALSE(done.query());

  b_->enqueue(second_gate_.work());
  b_->record(event_);
  gate_.open();
  done.synchronize(kLong, kWork);  // does not need stream b's record
  EXPECT_FALSE(event_.query());    // stream a's earlier record does not complete stream b's
}

TEST_F(HostStreams, AnEventMayBeDestroyedWhileItsRecordsAndWaitsAreQueued) {
  int value = 0;
  auto event = std::make_unique<HostEvent>();
  a_->enqueue(gate_.work());
  a_->enqueue([&] { value = 5; });
  a_->record(*event);
  b_->wait(*event, kWork);
  b_->enqueue([&] { value += 1; });
  event.reset();
  gate_.open();
  b_->synchronize();
  EXPECT_EQ(value, 6);
}

TEST_F(HostStreams, CapturedObjectsAreDestroyedBeforeTheNextEventCompletes) {
  auto captured = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = captured;
  a_->enqueue([captured = std::move(captured)] { EXPECT_EQ(*captured, 1); });
  a_->record(event_);
  event_.synchronize(kLong, kWork);
  EXPECT_TRUE(alive.expired());
}

// Otherwise a destructor that takes a lock would deadlock with a thread that enqueues under it.
TEST_F(HostStreams, DestructorsOfCapturedObjectsMayUseTheStream) {
  int value = 0;
  std::shared_ptr<void> captured(nullptr, [&](void*) { a_->enqueue([&] { value = 9; }); });
  a_->enqueue([captured = std::move(captured)] {});
  a_->synchronize();
  a_->synchronize();
  EXPECT_EQ(value, 9);
}

// - Errors, see Note [errors on streams]

TEST_F(HostStreams, WorkThatThrowsFailsItsStream) {
  bool ran = false;
  a_->enqueue([] { throw std::out_of_range("row 12 of 10"); });
  a_->enqueue([&] { ran = true; });
  a_->record(event_);
  EXPECT_EQ(message_of<std::out_of_range>([&] { event_.synchronize(kLong, kWork); }),
            "row 12 of 10");
  EXPECT_TRUE(event_.query());
  EXPECT_FALSE(ran);
  EXPECT_EQ(message_of<std::out_of_range>([&] { compute_.wait(event_, kWork); }), "row 12 of 10");
  EXPECT_EQ(message_of<std::out_of_range>([&] { a_->synchronize(); }), "row 12 of 10");
}

TEST_F(HostStreams, AStreamThatWaitsForAFailedOneFailsWithItsError) {
  const auto c = make_stream("c");
  HostEvent b_done;
  bool ran = false;
  a_->enqueue(gate_.work());
  a_->enqueue([] { throw Error("rank 3 is gone"); });
  a_->record(event_);
  b_->wait(event_, kWork);
  b_->enqueue([&] { ran = true; });
  b_->record(b_done);
  gate_.open();
  EXPECT_EQ(message_of<Error>([&] { b_done.synchronize(kLong, kWork); }), "rank 3 is gone");
  EXPECT_FALSE(ran);

  // The same holds if the event has failed before the wait is issued.
  c->wait(b_done, kWork);
  c->enqueue([&] { ran = true; });
  EXPECT_EQ(message_of<Error>([&] { c->synchronize(); }), "rank 3 is gone");
  EXPECT_FALSE(ran);
}

TEST_F(HostStreams, AStreamThatDoesNotWaitForAFailedOneGoesOn) {
  a_->enqueue([] { throw Error("lost"); });
  EXPECT_THROW(a_->synchronize(), Error);
  bool ran = false;
  b_->enqueue([&] { ran = true; });
  b_->synchronize();
  EXPECT_TRUE(ran);
}

TEST_F(HostStreams, AnErrorBelongsToItsRecord) {
  HostEvent done;
  const auto waiter = make_stream("waiter");
  a_->enqueue(gate_.work());
  a_->enqueue([] { throw Error("lost"); });
  a_->record(event_);
  waiter->wait(event_, kWork);
  waiter->record(done);
  b_->record(event_);
  event_.synchronize(kLong, kWork);
  gate_.open();
  EXPECT_EQ(message_of<Error>([&] { done.synchronize(kLong, kWork); }), "lost");
  event_.synchronize(kLong, kWork);  // stream b's record does not get stream a's error
}

TEST_F(HostStreams, WorkOfTheComputeStreamThrowsToTheCaller) {
  EXPECT_THROW(compute_.enqueue([] { throw Error("here"); }), Error);
}

// - Timeouts

TEST_F(HostStreams, SynchronizeTimesOutAndSaysWhatItWaitedFor) {
  a_->enqueue(gate_.work());
  a_->record(event_);
  const std::string message = message_of<TimeoutError>(
      [&] { event_.synchronize(kShort, "the all-gather of unit 'layers.3'"); });
  EXPECT_TRUE(contains(message, "50 ms for the all-gather of unit 'layers.3'")) << message;
  gate_.open();
  event_.synchronize(kLong, kWork);  // a timeout does not fail the late stream
}

TEST_F(HostStreams, AWorkerThatTimesOutFailsItsStream) {
  const auto impatient = make_stream("impatient", kShort);
  HostEvent done;
  bool ran = false;
  a_->enqueue(gate_.work());
  a_->record(event_);
  impatient->wait(event_, kWork);
  impatient->enqueue([&] { ran = true; });
  impatient->record(done);
  const std::string message =
      message_of<TimeoutError>([&] { done.synchronize(kLong, "stream 'impatient'"); });
  EXPECT_TRUE(contains(message, "50 ms for the work before")) << message;
  EXPECT_FALSE(ran);
}

TEST_F(HostStreams, TheComputeStreamTimesOut) {
  InlineStream impatient(kShort);
  a_->enqueue(gate_.work());
  a_->record(event_);
  const std::string message = message_of<TimeoutError>([&] { impatient.wait(event_, kWork); });
  EXPECT_TRUE(contains(message, "50 ms for the work before")) << message;
}

TEST_F(HostStreams, SynchronizingAStreamTimesOutAndNamesIt) {
  const auto impatient = make_stream("reduce", kShort);
  impatient->enqueue(gate_.work());
  const std::string message = message_of<TimeoutError>([&] { impatient->synchronize(); });
  EXPECT_TRUE(contains(message, "50 ms for stream 'reduce'")) << message;
  gate_.open();  // the worker still completes the record of the synchronize that timed out
}

TEST_F(HostStreams, TheLongestTimeoutDoesNotOverflow) {
  a_->enqueue(gate_.work());
  a_->record(event_);
  std::thread opener([&] { gate_.open(); });
  event_.synchronize(milliseconds::max(), kWork);
  opener.join();
  EXPECT_TRUE(event_.query());
}

// - Lifetimes and names

TEST_F(HostStreams, TheDestructorFinishesAllIssuedWork) {
  int count = 0;
  a_->enqueue(gate_.work());
  for (int i = 0; i < 100; ++i) {
    a_->enqueue([&] { ++count; });
  }
  a_->record(event_);
  gate_.open();
  a_.reset();
  EXPECT_EQ(count, 100);
  EXPECT_TRUE(event_.query());

  // Work without a record behind it is finished, too: Note [doorbell].
  b_->enqueue([&] { ++count; });
  b_.reset();
  EXPECT_EQ(count, 101);
}

TEST_F(HostStreams, ThreadsHaveTheNamesOfTheirStreams) {
  const auto thread_name = [](HostStream& stream) {
    char name[16] = "";
    stream.enqueue([&] { pthread_getname_np(pthread_self(), name, sizeof(name)); });
    stream.synchronize();
    return std::string(name);
  };
  EXPECT_EQ(a_->name(), "a");
  EXPECT_EQ(thread_name(*a_), "fsdp:a");
  const auto longest = make_stream("a name longer than the kernel keeps");
  EXPECT_EQ(thread_name(*longest), "fsdp:a name lon");
}

// - Many threads. The integers are plain, so ThreadSanitizer sees every missing wait.

TEST_F(HostStreams, ARingOfStreamsPassesAValueOn) {
  constexpr int kStreams = 5;
  constexpr int kRounds = 400;
  std::vector<std::unique_ptr<HostStream>> streams;
  std::vector<HostEvent> events(kStreams);
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(make_stream("ring"));
  }
  std::int64_t value = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kStreams; ++i) {
      streams[i]->wait(events[(i + kStreams - 1) % kStreams], kWork);
      streams[i]->enqueue([&value, expected = round * kStreams + i] {
        if (value == expected) {
          ++value;
        }
      });
      streams[i]->record(events[i]);
    }
  }
  events[kStreams - 1].synchronize(kLong, kWork);
  EXPECT_EQ(value, kStreams * kRounds);
}

TEST_F(HostStreams, ManyThreadsIssueToOneStreamAndWaitForTheirOwnWork) {
  constexpr int kThreads = 6;
  constexpr int kRounds = 300;
  std::int64_t total = 0;  // only stream a uses it
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      InlineStream compute(kLong);
      HostEvent done;
      int mine = 0;
      for (int round = 1; round <= kRounds; ++round) {
        a_->enqueue([&] {
          ++total;
          ++mine;
        });
        a_->record(done);
        if (round % 3 != 0) {
          compute.wait(done, kWork);
          wrong[thread] += mine != round;
        }
      }
      done.synchronize(kLong, kWork);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  a_->synchronize();
  EXPECT_EQ(total, kThreads * kRounds);
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

TEST_F(HostStreams, ManyThreadsSeeTheErrorOfOneStream) {
  a_->enqueue(gate_.work());
  a_->enqueue([] { throw Error("lost"); });
  a_->record(event_);
  std::vector<std::string> messages(6);
  std::vector<std::thread> threads;
  for (std::string& message : messages) {
    threads.emplace_back(
        [&] { message = message_of<Error>([&] { event_.synchronize(kLong, kWork); }); });
  }
  gate_.open();
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(messages, std::vector<std::string>(6, "lost"));
}

// - The device

TEST(HostDevice, MemoryIsAlignedAndOwned) {
  const std::unique_ptr<Device> device = make_host_device(kLong);
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 4097}) {
    const std::shared_ptr<void> memory = device->allocate(bytes);
    ASSERT_NE(memory, nullptr) << bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 64, 0u) << bytes;
    std::memset(memory.get(), 1, bytes);
  }
}

TEST(HostDevice, AFailedAllocationSaysHowManyBytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers' allocators abort instead";
#endif
  const std::unique_ptr<Device> device = make_host_device(kLong);
  for (const std::size_t bytes : {std::size_t{1} << 62, ~std::size_t{0}}) {
    const std::string message = message_of<Error>([&] { device->allocate(bytes); });
    EXPECT_TRUE(contains(message, std::to_string(bytes) + " bytes")) << message;
  }
}

TEST(HostDevice, FillRunsInTheOrderOfItsStream) {
  const std::unique_ptr<Device> device = make_host_device(kLong);
  const std::unique_ptr<Stream> stream = device->new_stream("fill");
  const std::unique_ptr<Event> filled = device->new_event();
  std::vector<unsigned char> data(100, 1);
  unsigned char before = 0;
  unsigned char after = 0;
  auto& queue = static_cast<HostQueue&>(*stream);
  queue.enqueue([&] { before = data[99]; });
  device->fill(*stream, data.data(), 0xff, data.size());
  queue.enqueue([&] { after = data[99]; });
  stream->record(*filled);
  device->compute_stream().wait(*filled, kWork);
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 0xff);
  EXPECT_TRUE(device->is_host());
  EXPECT_EQ(device->timeout(), kLong);
}

// - Streams without a thread

TEST(InlineStreams, WorkHasRunOnTheCallingThreadWhenItIsIssued) {
  const std::unique_ptr<Device> device = make_host_device(kLong, fsdp::HostStreams::Inline);
  const std::unique_ptr<Stream> stream = device->new_stream("lane");
  std::uint64_t thread = 0;
  static_cast<HostQueue&>(*stream).enqueue([&] { thread = this_thread(); });
  EXPECT_EQ(thread, this_thread());
  HostEvent event;
  stream->record(event);
  EXPECT_FALSE(device->compute_stream().wait(event, kWork)) << "there is nothing to wait for";
}

TEST(InlineStreams, WorkThatThrowsFailsTheStreamAndThoseThatWaitForIt) {
  const std::unique_ptr<Device> device = make_host_device(kLong, fsdp::HostStreams::Inline);
  const std::unique_ptr<Stream> failed = device->new_stream("failed");
  const std::unique_ptr<Stream> waiting = device->new_stream("waiting");
  int ran = 0;
  static_cast<HostQueue&>(*failed).enqueue([] { throw Error("broken"); });
  static_cast<HostQueue&>(*failed).enqueue([&] { ran += 1; });
  HostEvent event;
  failed->record(event);
  EXPECT_TRUE(waiting->wait(event, kWork));
  static_cast<HostQueue&>(*waiting).enqueue([&] { ran += 1; });
  EXPECT_EQ(ran, 0);
  EXPECT_THROW(failed->synchronize(), Error);
  EXPECT_THROW(waiting->synchronize(), Error);
  EXPECT_THROW(device->compute_stream().wait(event, kWork), Error);
}

}  // namespace
}  // namespace fsdp
