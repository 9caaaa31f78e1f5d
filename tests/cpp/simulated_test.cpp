// The simulated transport: how long its collectives take, and what they copy. The tests use a
// device that records transfers instead of running them.
#include "comm/simulated.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/check.h"
#include "device/host_stream.h"

namespace fsdp::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

struct Transfer {
  nanoseconds duration;
  std::vector<Move> moves;
  int multiprocessors;
};

class RecordingDevice final : public Device {
 public:
  bool is_host() const override { return true; }
  Stream& compute_stream() override { return host_->compute_stream(); }
  std::unique_ptr<Stream> new_stream(const std::string& name) override {
    return host_->new_stream(name);
  }
  std::unique_ptr<Event> new_event() override { return host_->new_event(); }
  std::unique_ptr<Moments> new_moments() override { return host_->new_moments(); }
  std::shared_ptr<void> allocate_for(Stream& stream, std::size_t bytes) override {
    return host_->allocate_for(stream, bytes);
  }
  void fill(Stream& stream, void* data, int value, std::size_t bytes) override {
    host_->fill(stream, data, value, bytes);
  }
  void copy(Stream& stream, const void* source, void* destination, std::size_t bytes) override {
    host_->copy(stream, source, destination, bytes);
  }
  void transfer(Stream& /*stream*/, nanoseconds duration, const std::vector<Move>& moves,
                int multiprocessors) override {
    transfers.push_back({duration, moves, multiprocessors});
  }
  milliseconds timeout() const override { return host_->timeout(); }

  std::vector<Transfer> transfers;

 private:
  std::unique_ptr<Device> host_ = make_host_device(milliseconds(60000));
};

class SimulatedCollectives : public ::testing::Test {
 protected:
  SimulatedCollectives() {
    options_.rank = 2;
    options_.size = 4;
    options_.gather = {10e-6, 1e9};
    options_.reduce = {20e-6, 2e9};
    options_.multiprocessors = 16;
  }

  std::unique_ptr<Communicator> make() { return make_simulated_communicator(device_, options_); }
  Stream& stream() { return device_.compute_stream(); }
  std::vector<nanoseconds> durations() const {
    std::vector<nanoseconds> result;
    for (const Transfer& transfer : device_.transfers) {
      result.push_back(transfer.duration);
    }
    return result;
  }

  RecordingDevice device_;
  SimulatedOptions options_;
  char input_[4000] = {};
  char output_[4000] = {};
};

TEST_F(SimulatedCollectives, TakeAlphaPlusTotalBytesOverBeta) {
  const auto link = make();
  link->all_gather(stream(), input_, output_, 1000);
  link->reduce_scatter(stream(), input_, output_, 250, DType::Float32);
  link->all_reduce(stream(), input_, 1000, DType::Float32);
  EXPECT_EQ(durations(), (std::vector<nanoseconds>{microseconds(10 + 4), microseconds(20 + 2),
                                                   microseconds(20 + 4)}));
  EXPECT_EQ(device_.transfers[0].multiprocessors, 16);
  EXPECT_STREQ(link->traits().name, "simulated");
}

TEST_F(SimulatedCollectives, MoveTheRanksOwnPartByDefault) {
  const auto link = make();
  link->all_gather(stream(), input_, output_, 1000);
  link->reduce_scatter(stream(), input_, output_, 250, DType::Float32);
  const Move& gathered = device_.transfers[0].moves.at(0);
  EXPECT_EQ(gathered.source, input_);
  EXPECT_EQ(gathered.destination, output_ + 2000);
  EXPECT_EQ(gathered.bytes, 1000U);
  EXPECT_EQ(gathered.count, 1);
  const Move& reduced = device_.transfers[1].moves.at(0);
  EXPECT_EQ(reduced.source, input_ + 2000);
  EXPECT_EQ(reduced.destination, output_);
}

TEST_F(SimulatedCollectives, MoveAsMuchAsRealOnesWithWholeTraffic) {
  options_.on_gpu = true;
  const auto link = make();
  link->all_gather(stream(), input_, output_, 1000);
  link->reduce_scatter(stream(), input_, output_, 250, DType::Float32);
  const Move& gathered = device_.transfers[0].moves.at(0);
  EXPECT_EQ(gathered.destination, output_);
  EXPECT_EQ(gathered.count, 4);
  EXPECT_EQ(gathered.source_step, 0U);
  EXPECT_EQ(gathered.destination_step, 1000U);
  EXPECT_EQ(gathered.written_piece, Move::kAllPieces);
  const Move& reduced = device_.transfers[1].moves.at(0);
  EXPECT_EQ(reduced.count, 4);
  EXPECT_EQ(reduced.source_step, 1000U);
  EXPECT_EQ(reduced.destination_step, 0U);
  EXPECT_EQ(reduced.written_piece, 2) << "the others are only read, as for sending";
}

TEST_F(SimulatedCollectives, MoveNothingInABaseline) {
  options_.on_gpu = true;
  options_.moves_memory = false;
  const auto link = make();
  link->all_gather(stream(), input_, output_, 1000);
  EXPECT_TRUE(device_.transfers.at(0).moves.empty());
  EXPECT_EQ(device_.transfers.at(0).duration, microseconds(10 + 4));
  options_.gather = {0.0, 1e30};
  make()->all_gather(stream(), input_, output_, 1000);
  EXPECT_EQ(device_.transfers.size(), 1U) << "a link that takes no time launches nothing";
}

TEST_F(SimulatedCollectives, PayTheLatencyOfAGroupOnce) {
  const auto link = make();
  link->all_gather_parts(stream(), {{input_, output_, 500}, {input_ + 500, output_ + 2000, 250}});
  EXPECT_EQ(durations(), std::vector<nanoseconds>{microseconds(10 + 3)});
  EXPECT_EQ(device_.transfers[0].moves.size(), 2U);
}

TEST_F(SimulatedCollectives, GiveZeroedMemoryAndThisRanksBytesForAllRanks) {
  const auto link = make();
  const auto memory = link->allocate(device_, 4096, BufferUse::Output);
  EXPECT_EQ(static_cast<const float*>(memory.get())[1023], 0.0f);
  const int mine = 7;
  int all[4] = {};
  link->host_all_gather(stream(), &mine, all, sizeof(mine));
  EXPECT_EQ(std::vector<int>(all, all + 4), std::vector<int>(4, 7));
}

// The collectives run one after another, each for at least its duration.
TEST(SimulatedOnTheHost, SleepsOnItsStreamAndCopies) {
  const auto device = make_host_device(milliseconds(60000));
  const auto stream = device->new_stream("gather");
  SimulatedOptions options;
  options.size = 2;
  options.rank = 1;
  options.gather = {5e-3, 1e12};
  const auto link = make_simulated_communicator(*device, options);
  const int mine = 5;
  int all[2] = {1, 1};
  const auto start = std::chrono::steady_clock::now();
  link->all_gather(*stream, &mine, all, sizeof(mine));
  link->all_gather(*stream, &mine, all, sizeof(mine));
  stream->synchronize();
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(10));
  EXPECT_EQ(all[0], 1);
  EXPECT_EQ(all[1], 5);
}

}  // namespace
}  // namespace fsdp::test
