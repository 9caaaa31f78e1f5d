// Flight records: how far each collective is, what is kept, and when a record is written.
#include "core/record/flight_recorder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/pickle.h"
#include "schedule_ranks.h"

namespace fsdp::test {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kEntries = 8;
constexpr FlightPlan kPlan{Collective::AllGather, Phase::Forward, 64, DType::Bytes};
const std::string kLabel = "the all-gather of unit 'a'";

class FlightTapes : public ::testing::Test {
 protected:
  FlightTapes()
      : device_(make_host_device(kTimeout)),
        point_(std::make_shared<MeetingPoint>(1, kTimeout)),
        over_(point_, 0),
        tape_(*device_, kEntries),
        lane_(device_->new_stream("lane")) {
    over_.set_flight_group({"0.gather", "gathers", "gloo", {0}, 0});
  }

  // A collective that runs `work`.
  void fly(std::function<void()> work) {
    const InFlight flight(&tape_, *lane_, over_, kPlan, kLabel);
    static_cast<HostQueue&>(*lane_).enqueue(std::move(work));
  }
  void reach_the_end() {
    const std::unique_ptr<Event> end = device_->new_event();
    lane_->record(*end);
    end->synchronize(kTimeout, "the lane");
  }
  std::vector<FlightState> states() const {
    const std::vector<SeenFlight> kept = tape_.look().value();
    std::vector<FlightState> found;
    for (const SeenFlight& seen : kept) {
      found.push_back(seen.state);
    }
    return found;
  }

  std::unique_ptr<Device> device_;
  std::shared_ptr<MeetingPoint> point_;
  ThreadsCommunicator over_;
  FlightTape tape_;
  std::unique_ptr<Stream> lane_;
};

TEST_F(FlightTapes, TellHowFarEachCollectiveIs) {
  std::promise<void> entered;
  std::promise<void> leave;
  fly([] {});
  fly([&] {
    entered.set_value();
    leave.get_future().wait();
  });
  fly([] {});
  const std::unique_ptr<Event> end = device_->new_event();
  lane_->record(*end);
  entered.get_future().wait();
  EXPECT_EQ(states(), (std::vector<FlightState>{FlightState::Completed, FlightState::Started,
                                                FlightState::Scheduled}));
  leave.set_value();
  end->synchronize(kTimeout, "the lane");
  const std::vector<SeenFlight> seen = tape_.look().value();
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].state, FlightState::Completed);
    EXPECT_EQ(seen[i].flight.number, i + 1);
    EXPECT_EQ(seen[i].flight.sequence, i + 1);
    EXPECT_EQ(seen[i].flight.label, kLabel);
    EXPECT_LE(seen[i].flight.issued, seen[i].started);
    EXPECT_LE(seen[i].started, seen[i].completed);
    EXPECT_GE(seen[i].seconds.value(), 0.0);
  }
}

TEST_F(FlightTapes, LeaveWhatHasFailedIncomplete) {
  fly([] {});
  fly([] { throw Error("a peer has gone"); });
  fly([] {});
  EXPECT_THROW(reach_the_end(), Error);
  EXPECT_EQ(states(), (std::vector<FlightState>{FlightState::Completed, FlightState::Started,
                                                FlightState::Scheduled}));
}

TEST_F(FlightTapes, AreNotToldOfTheEndOfACallThatThrows) {
  EXPECT_THROW(
      {
        const InFlight flight(&tape_, *lane_, over_, kPlan, kLabel);
        throw Error("the call failed");
      },
      Error);
  reach_the_end();
  EXPECT_EQ(states(), (std::vector<FlightState>{FlightState::Started}));
}

TEST_F(FlightTapes, KeepTheNewestInTheMemoryOfTheOldest) {
  for (std::size_t i = 0; i < 3 * kEntries + 2; ++i) {
    fly([] {});
  }
  reach_the_end();
  const std::vector<SeenFlight> seen = tape_.look().value();
  ASSERT_EQ(seen.size(), kEntries);
  EXPECT_EQ(seen.front().flight.number, 2 * kEntries + 3);
  EXPECT_EQ(seen.back().flight.number, 3 * kEntries + 2);
}

TEST_F(FlightTapes, RecordNothingWhileTheyAreOffOrWithoutAGroup) {
  tape_.turn(false);
  fly([] {});
  tape_.turn(true);
  ThreadsCommunicator nameless(point_, 0);
  {
    const InFlight flight(&tape_, *lane_, nameless, kPlan, kLabel);
  }
  EXPECT_TRUE(states().empty());
  fly([] {});
  EXPECT_EQ(states().size(), 1U);
}

TEST_F(FlightTapes, CutLongLabels) {
  {
    const InFlight flight(&tape_, *lane_, over_, kPlan, std::string(500, 'x'));
  }
  EXPECT_EQ(std::string(tape_.look().value().front().flight.label), std::string(95, 'x'));
}

// ThreadSanitizer looks on.
TEST_F(FlightTapes, MayBeReadWhileTheyRecord) {
  std::atomic<bool> is_done{false};
  std::thread reader([&] {
    while (!is_done) {
      (void)tape_.look();
    }
  });
  for (int i = 0; i < 500; ++i) {
    fly([] {});
  }
  reach_the_end();
  is_done = true;
  reader.join();
  EXPECT_EQ(states(), std::vector<FlightState>(kEntries, FlightState::Completed));
}

// - Records

class FlightRecords : public ::testing::Test {
 protected:
  FlightRecords()
      : folder_(std::filesystem::temp_directory_path() /
                ("fsdp_ext_flights_" + std::to_string(::getpid()))) {}
  ~FlightRecords() override { std::filesystem::remove_all(folder_); }

  std::string prefix() const { return (folder_ / "sub" / "trace_rank_").string(); }
  static std::string content_of(const std::string& path) {
    const std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
  }
  static void record(FlightRecorder& recorder, Lanes& lanes) {
    for (Lane* lane : {&lanes.gather, &lanes.reduce}) {
      lane->communicator().set_flight_group({lane->stream().name(), "a lane", "gloo", {0, 1}, 0});
    }
    recorder.record(lanes);
  }

  std::filesystem::path folder_;
};

// Rank 0 of two. The other one never comes.
struct Lonely {
  explicit Lonely(milliseconds streams, milliseconds meeting = milliseconds(800))
      : gather_point(std::make_shared<MeetingPoint>(2, meeting)),
        reduce_point(std::make_shared<MeetingPoint>(2, meeting)),
        lanes(make_lanes(new ThreadsCommunicator(gather_point, 0), reduce_point, 0, streams)),
        unit(0, FakeUnit::make_layout(2, "w"), 0) {}

  std::string error_of_forward() {
    PipelineOptions options;
    options.check_order = false;
    Pipeline pipeline(lanes, options);
    pipeline.units().add({"lonely", FakeUnit::make_layout(2, "w")}, unit);
    pipeline.begin_forward();
    try {
      pipeline.pre_forward(0);
    } catch (const TimeoutError& error) {
      return error.what();
    }
    return "no timeout";
  }

  std::shared_ptr<MeetingPoint> gather_point;
  std::shared_ptr<MeetingPoint> reduce_point;
  Lanes lanes;
  FakeUnit unit;
};

TEST_F(FlightRecords, AreWrittenWhenAPeerNeverComes) {
  const auto recorder = std::make_shared<FlightRecorder>(7, kEntries, prefix());
  Lonely rank(milliseconds(200));
  record(*recorder, rank.lanes);
  const std::string message = rank.error_of_forward();
  expect_contains(message, "200 ms for the all-gather of unit 'lonely'");
  expect_contains(message, "The flight record of rank 7 is in " + prefix() + "7.");
  const std::string content = content_of(recorder->path());
  expect_contains(content, "the all-gather of unit 'lonely' in forward");
  expect_contains(content, "started");
  EXPECT_EQ(content.find("scheduled"), std::string::npos);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "sub"), {}), 1);
}

TEST_F(FlightRecords, AreWrittenWhenTheTransportGivesUp) {
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix());
  Lonely rank(kTimeout, milliseconds(20));
  record(*recorder, rank.lanes);
  const std::string message = rank.error_of_forward();
  expect_contains(message, "a peer did not come to the meeting point");
  expect_contains(message, "The flight record of rank 0 is in ");
  expect_contains(content_of(recorder->path()), "started");
}

TEST_F(FlightRecords, ThatCannotBeWrittenLeaveTheError) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "sub") << "a file in the place of the folder";
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix());
  Lonely rank(milliseconds(200));
  record(*recorder, rank.lanes);
  const std::string message = rank.error_of_forward();
  expect_contains(message, "200 ms for the all-gather of unit 'lonely'");
  expect_contains(message, "There is no flight record: fsdp_ext could not write the flight record");
  expect_contains(message, "Not a directory");
}

// Opening a pipe for writing blocks until somebody reads it. Ranks of hosts that share a folder
// have different files, although their processes may have one id.
TEST_F(FlightRecords, ThatTakeTooLongDoNotHoldUpTheError) {
  std::filesystem::create_directories(folder_ / "sub");
  char host[64] = {};
  ASSERT_EQ(::gethostname(host, sizeof(host) - 1), 0);
  std::vector<std::string> pipes;
  for (int i = 1; i < 100; ++i) {
    const std::string name =
        detail::concat(".unfinished_trace_rank_0_", host, "_", ::getpid(), "_", i);
    pipes.push_back((folder_ / "sub" / name).string());
    ASSERT_EQ(::mkfifo(pipes.back().c_str(), 0600), 0);
  }
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix(), milliseconds(30));
  Lonely rank(milliseconds(200));
  record(*recorder, rank.lanes);
  const std::string message = rank.error_of_forward();
  expect_contains(message, "200 ms for the all-gather of unit 'lonely'");
  expect_contains(message, "There is no flight record yet: fsdp_ext has waited 30 ms for " +
                               recorder->path() + " to be written.");
  std::vector<int> readers;
  for (const std::string& pipe : pipes) {
    readers.push_back(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK));
  }
  while (!std::filesystem::exists(recorder->path())) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (const int reader : readers) {
    ::close(reader);
  }
}

TEST_F(FlightRecords, AreNotWrittenForOtherErrors) {
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix());
  Lonely rank(kTimeout);
  record(*recorder, rank.lanes);
  const std::string message = [&] {
    try {
      try {
        throw Error("Pass another argument.");
      } catch (const Error& error) {
        throw_with_flight_record(error, rank.lanes, nullptr);
      }
    } catch (const Error& error) {
      return std::string(error.what());
    }
  }();
  EXPECT_EQ(message, "Pass another argument.");
  EXPECT_FALSE(std::filesystem::exists(recorder->path()));
}

TEST_F(FlightRecords, HoldAWholeStepOfBothLanes) {
  const auto recorder = std::make_shared<FlightRecorder>(0, 100, prefix());
  on_ranks(2, 4, [&](Rank& rank, int r) {
    if (r == 0) {
      record(*recorder, rank.lanes);
    }
    rank.step(1.0F);
    if (r == 0) {
      recorder->write(recorder->path());
    }
  });
  const std::string content = content_of(recorder->path());
  for (const char* part :
       {"the comparison of the all-gather of unit 'unit1'",
        "the all-gather of unit 'unit1' in forward", "the all-gather of unit 'unit1' in backward",
        "the reduce-scatter of unit 'unit2' in backward",
        "the exchange of all ranks at the end of backward", "gloo:_reduce_scatter_base"}) {
    expect_contains(content, part);
  }
}

// After a watchdog has ended a collective, all of them look complete.
TEST_F(FlightRecords, AreNotReplacedByOnesOfEndedCollectives) {
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix());
  Lonely rank(milliseconds(200));
  record(*recorder, rank.lanes);
  const std::string said = recorder->account_before_abort();
  expect_contains(said, "The flight record of rank 0 is in ");
  std::filesystem::remove(recorder->path());
  EXPECT_EQ(recorder->account_before_abort(), said);
  expect_contains(rank.error_of_forward(), said);
  EXPECT_FALSE(std::filesystem::exists(recorder->path()));
  Lonely later(milliseconds(200));
  record(*recorder, later.lanes);
  later.error_of_forward();
  EXPECT_TRUE(std::filesystem::exists(recorder->path()));
}

TEST_F(FlightRecords, LeaveOutLanesThatAreGone) {
  const auto recorder = std::make_shared<FlightRecorder>(0, kEntries, prefix());
  {
    Lonely rank(milliseconds(200));
    record(*recorder, rank.lanes);
    rank.error_of_forward();
  }
  recorder->write(recorder->path());
  EXPECT_EQ(content_of(recorder->path()).find("lonely"), std::string::npos);
}

TEST(Pickle, WritesWhatPythonReads) {
  PickleWriter file;
  file.begin_dict();
  file.add("a");
  file.add(std::int64_t{-2});
  file.end_dict();
  EXPECT_EQ(file.finish(), std::string("\x80\x02}(X\x01\0\0\0a\x8a\x08\xFE\xFF\xFF\xFF\xFF\xFF\xFF"
                                       "\xFFu.",
                                       22));
}

TEST(Pickle, ReplacesBytesThatAreNoText) {
  PickleWriter file;
  file.add(std::string("\xC3\xA4 \xC3 \xFF \xED\xA0\x80", 10));
  expect_contains(file.finish(), "\xC3\xA4 ? ? ???");
}

}  // namespace
}  // namespace fsdp::test
