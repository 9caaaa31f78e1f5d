// The schedule over ranks that are threads: counts, values under delays, and what goes wrong.
#include "core/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "threads_communicator.h"

namespace fsdp::test {
namespace {

constexpr std::chrono::milliseconds kTimeout{5000};
constexpr std::int64_t kRows = 7;  // uneven for every number of ranks
constexpr std::int64_t kColumns = 3;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\" in: " << text;
}

float value_of(int unit, int version, std::int64_t param, std::int64_t element) {
  return static_cast<float>(1000 * unit + 100 * version + 10 * param) +
         static_cast<float>(element) / 32.0F;
}

Lanes make_lanes(ThreadsCommunicator* gather, std::shared_ptr<MeetingPoint> reduce_point, int rank,
                 std::chrono::milliseconds timeout) {
  return {make_host_device(timeout), make_host_packer(), std::unique_ptr<Communicator>(gather),
          std::make_unique<ThreadsCommunicator>(std::move(reduce_point), rank)};
}

// A unit of two parameters over plain memory.
class FakeUnit final : public UnitPort {
 public:
  FakeUnit(int number, UnitLayout layout, int rank)
      : number_(number),
        rank_(rank),
        layout_(std::move(layout)),
        shard_(new float[layout_.shard_bytes() / sizeof(float)](), std::default_delete<float[]>()),
        gradient_(new float[static_cast<std::size_t>(layout_.grad_numel())],
                  std::default_delete<float[]>()) {
    std::fill_n(gradient(), layout_.grad_numel(), NAN);
    write_shard();
  }

  static UnitLayout make_layout(int world_size, const std::string& prefix) {
    std::vector<ParamSpec> params(2);
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].name = prefix + std::to_string(i);
      params[i].rows = kRows + static_cast<std::int64_t>(i);
      params[i].row_numel = kColumns;
    }
    return {params, world_size, DType::Float32, DType::Float32, /*direct_bytes=*/0};
  }

  void attach(void* unsharded) override {
    attached_ = static_cast<const float*>(unsharded);
    attaches_ += 1;
  }
  void detach() override { attached_ = nullptr; }
  void* flat_shard() override { return shard_.get(); }
  void* flat_gradient() override { return gradient_.get(); }
  void move_shard(std::shared_ptr<void> memory) override {
    std::memcpy(memory.get(), shard_.get(), layout_.shard_bytes());
    shard_ = std::move(memory);
    moves_ += 1;
  }
  void move_gradient(std::shared_ptr<void> memory) override {
    std::memcpy(memory.get(), gradient_.get(),
                static_cast<std::size_t>(layout_.grad_numel()) * sizeof(float));
    gradient_ = std::move(memory);
  }
  std::uint64_t shard_version() override { return static_cast<std::uint64_t>(version_); }

  std::shared_ptr<void> extract_gradients(const void** addresses) override {
    auto taken = std::make_shared<std::vector<std::vector<float>>>(std::move(gradients_));
    gradients_.assign(2, {});
    for (std::size_t i = 0; i < 2; ++i) {
      addresses[i] = (*taken)[i].empty() ? nullptr : (*taken)[i].data();
    }
    return taken;
  }
  DType gradient_dtype() override { return DType::Float32; }
  void drop_gradients() override { gradients_.assign(2, {}); }
  bool has_sharded_gradient(std::size_t i) override { return has_gradient_[i]; }
  void import_sharded_gradient(std::size_t) override {}
  void set_sharded_gradient(std::size_t i) override { has_gradient_[i] = true; }

  void zero_grad() { has_gradient_.assign(2, false); }
  void change_shard() {
    version_ += 1;
    write_shard();
  }
  void add_gradient(std::size_t param, float value) {
    std::vector<float>& gradient = gradients_[param];
    gradient.resize(static_cast<std::size_t>(layout_.placements()[param].numel), 0.0F);
    for (float& element : gradient) {
      element += value;
    }
  }

  // The whole parameters are there.
  void expect_unsharded() const {
    ASSERT_NE(attached_, nullptr) << "unit " << number_;
    for (std::size_t param = 0; param < 2; ++param) {
      const ParamPlacement& place = layout_.placements()[param];
      const float* data = attached_ + place.unsharded_offset / sizeof(float);
      for (std::int64_t i = 0; i < place.numel; ++i) {
        ASSERT_EQ(data[i], value_of(number_, version_, static_cast<std::int64_t>(param), i))
            << "unit " << number_ << " parameter " << param << " element " << i;
      }
    }
  }

  void expect_gradient(std::size_t param, float value) const {
    const ParamPlacement& place = layout_.placements()[param];
    const std::int64_t rows = layout_.row_count(param, rank_);
    for (std::int64_t i = 0; i < rows * kColumns; ++i) {
      ASSERT_FLOAT_EQ(gradient()[place.grad_offset + i], value)
          << "unit " << number_ << " parameter " << param << " element " << i;
    }
  }

  bool is_attached() const { return attached_ != nullptr; }
  int moves() const { return moves_; }
  int attaches() const { return attaches_; }

 private:
  float* gradient() const { return static_cast<float*>(gradient_.get()); }

  void write_shard() {
    for (std::size_t param = 0; param < 2; ++param) {
      const ParamPlacement& place = layout_.placements()[param];
      const std::int64_t first = layout_.first_row(param, rank_) * kColumns;
      const std::int64_t numel = layout_.row_count(param, rank_) * kColumns;
      for (std::int64_t i = 0; i < numel; ++i) {
        static_cast<float*>(
            shard_.get())[place.shard_offset / sizeof(float) + static_cast<std::size_t>(i)] =
            value_of(number_, version_, static_cast<std::int64_t>(param), first + i);
      }
    }
  }

  int number_;
  int rank_;
  int version_ = 0;
  int attaches_ = 0;
  UnitLayout layout_;
  int moves_ = 0;
  std::shared_ptr<void> shard_;
  std::shared_ptr<void> gradient_;
  std::vector<std::vector<float>> gradients_{2};
  std::vector<bool> has_gradient_ = {false, false};
  const float* attached_ = nullptr;
};

// One rank: a root and `layers` units below it.
class Rank {
 public:
  Rank(int rank, int world_size, int layers, std::shared_ptr<MeetingPoint> gather_point,
       std::shared_ptr<MeetingPoint> reduce_point, PipelineOptions options = {},
       const std::function<std::string(int)>& name = {}, GatherBy gather_by = GatherBy::Packing,
       int bucket_units = 1, int message_rows = 0)
      : gather(new ThreadsCommunicator(std::move(gather_point), rank, gather_by)),
        lanes(make_lanes(gather, std::move(reduce_point), rank, kTimeout)) {
    for (int i = 0; i <= layers; ++i) {
      const std::string unit_name = name ? name(i) : "unit" + std::to_string(i);
      units.push_back(
          std::make_unique<FakeUnit>(i, FakeUnit::make_layout(world_size, unit_name), rank));
    }
    pipeline = std::make_unique<Pipeline>(lanes, options);
    for (int i = 0; i <= layers; ++i) {
      const std::string unit_name = name ? name(i) : "unit" + std::to_string(i);
      UnitConfig config{unit_name, FakeUnit::make_layout(world_size, unit_name)};
      config.reshard_after_forward = i != 0;
      config.pack_scale = 1.0 / world_size;
      config.parent = i == 0 ? -1 : 0;
      config.bucket_bytes =
          static_cast<std::size_t>(bucket_units * world_size) * config.layout.gather_bytes();
      config.max_message_bytes =
          static_cast<std::size_t>(message_rows * world_size * kColumns) * sizeof(float);
      pipeline->add_unit(std::move(config), *units[static_cast<std::size_t>(i)]);
    }
    pipeline->gatherer().set_poison_released_slots(false);
  }

  int layers() const { return static_cast<int>(units.size()) - 1; }
  FakeUnit& unit(int i) { return *units[static_cast<std::size_t>(i)]; }

  // Returns the forward call of each unit that ran.
  std::vector<int> forward(const std::vector<int>& order) {
    std::vector<int> calls(units.size(), -1);
    pipeline->begin_forward();
    pipeline->pre_forward(0);
    unit(0).expect_unsharded();
    for (const int i : order) {
      pipeline->pre_forward(i);
      unit(i).expect_unsharded();
      calls[static_cast<std::size_t>(i)] = pipeline->post_forward(i);
    }
    unit(0).expect_unsharded();
    calls[0] = pipeline->post_forward(0);
    pipeline->end_forward();
    return calls;
  }

  std::vector<int> in_order() const {
    std::vector<int> order;
    for (int i = 1; i <= layers(); ++i) {
      order.push_back(i);
    }
    return order;
  }

  void backward(const std::vector<int>& order, const std::vector<int>& calls, float gradient) {
    pipeline->begin_backward();
    pipeline->pre_backward(0, calls[0]);
    for (auto i = order.rbegin(); i != order.rend(); ++i) {
      pipeline->pre_backward(*i, calls[static_cast<std::size_t>(*i)]);
      unit(*i).expect_unsharded();
      bring_gradients(*i, gradient);
      pipeline->post_backward(*i);
    }
    bring_gradients(0, gradient);
    pipeline->end_backward();
  }

  void bring_gradients(int i, float gradient) {
    for (std::size_t param = 0; param < 2; ++param) {
      unit(i).add_gradient(param, gradient);
      pipeline->gradient_arrived(i, param);
    }
  }

  void step(float gradient) {
    const std::vector<int> order = in_order();
    backward(order, forward(order), gradient);
    for (const auto& each : units) {
      each->zero_grad();
      each->change_shard();
    }
  }

  ThreadsCommunicator* gather;
  Lanes lanes;
  std::vector<std::unique_ptr<FakeUnit>> units;
  std::unique_ptr<Pipeline> pipeline;
};

// Runs `body` once on each rank's thread; an exception of any rank fails the test.
void on_ranks(int world_size, int layers, const std::function<void(Rank&, int)>& body,
              PipelineOptions options = {}, GatherBy gather_by = GatherBy::Packing,
              int bucket_units = 1, int message_rows = 0) {
  auto gather_point = std::make_shared<MeetingPoint>(world_size, kTimeout);
  auto reduce_point = std::make_shared<MeetingPoint>(world_size, kTimeout);
  std::vector<std::future<void>> ranks;
  for (int r = 0; r < world_size; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      Rank rank(r, world_size, layers, gather_point, reduce_point, options, {}, gather_by,
                bucket_units, message_rows);
      body(rank, r);
    }));
  }
  for (auto& rank : ranks) {
    EXPECT_NO_THROW(rank.get());
  }
}

class PipelineOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, PipelineOnRanks, ::testing::Values(1, 2, 3));

TEST_P(PipelineOnRanks, EveryStepGathersTheParametersAndAveragesTheGradients) {
  const int world_size = GetParam();
  on_ranks(world_size, 4, [&](Rank& rank, int r) {
    for (int step = 0; step < 3; ++step) {
      const std::vector<int> order = rank.in_order();
      rank.backward(order, rank.forward(order), static_cast<float>(r + 1 + step));
      float mean = 0.0F;
      for (int other = 0; other < world_size; ++other) {
        mean += static_cast<float>(other + 1 + step) / static_cast<float>(world_size);
      }
      for (const auto& unit : rank.units) {
        unit->expect_gradient(0, mean);
        unit->expect_gradient(1, mean);
        EXPECT_FALSE(unit->is_attached());
        unit->zero_grad();
        unit->change_shard();
      }
    }
  });
}

// See Note [gather plans].
TEST(Pipeline, GathersLargeParametersToTheirPlacesInOneGroup) {
  on_ranks(
      2, 3,
      [&](Rank& rank, int) {
        rank.step(1.0F);
        const int groups = rank.gather->groups();
        rank.pipeline->ledger().reset();
        rank.step(1.0F);
        const Counters& counters = rank.pipeline->ledger().counters();
        EXPECT_EQ(counters.all_gathers, 5U);
        EXPECT_EQ(rank.gather->groups() - groups, 5);
        EXPECT_EQ(rank.pipeline->gatherer().staging_bytes(), 0U);
        // Packed gradients are all that is copied: two parameters of two chunks of four rows.
        EXPECT_EQ(counters.copied_bytes, 4U * 2 * 2 * (4 * kColumns) * 4 * 2);
      },
      {}, GatherBy::Size);
}

TEST(Pipeline, GathersOnceMoreThanUnitsInForwardAndTwiceLessInBackward) {
  constexpr int kLayers = 5;
  on_ranks(2, kLayers, [&](Rank& rank, int) {
    rank.step(1.0F);
    for (int step = 0; step < 3; ++step) {
      rank.pipeline->ledger().reset();
      rank.pipeline->ledger().enable_log(true);
      rank.step(1.0F);
      std::vector<int> forward;
      std::vector<int> backward;
      std::vector<int> reduced;
      for (const CollectiveRecord& record : rank.pipeline->ledger().log()) {
        if (record.op == Collective::ReduceScatter) {
          reduced.push_back(record.units.first);
        } else {
          (record.phase == Phase::Forward ? forward : backward).push_back(record.units.first);
        }
      }
      rank.pipeline->ledger().clear_log();
      EXPECT_EQ(forward, (std::vector<int>{0, 1, 2, 3, 4, 5}));
      EXPECT_EQ(backward, (std::vector<int>{3, 2, 1}));
      EXPECT_EQ(reduced, (std::vector<int>{5, 4, 3, 2, 1, 0}));
      const Counters& counters = rank.pipeline->ledger().counters();
      EXPECT_EQ(counters.reused_unshards, 2U);
      EXPECT_EQ(counters.overflow_slots, 0U);
      EXPECT_EQ(counters.peak_unsharded_units, 3);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->slots(), 2);
    }
  });
}

TEST(Pipeline, DeeperPrefetchUsesAsManySlotsMoreAndNoOthers) {
  PipelineOptions options;
  options.prefetch_depth = 3;
  on_ranks(
      2, 6,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.step(1.0F);
        EXPECT_EQ(rank.pipeline->gatherer().ring()->slots(), 4);
        EXPECT_EQ(rank.pipeline->ledger().counters().peak_unsharded_units, 5);
        EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
      },
      options);
}

TEST(Pipeline, ResultsDoNotDependOnHowLongAStreamTakes) {
  for (const bool delay_gather : {true, false}) {
    on_ranks(2, 3, [&](Rank& rank, int r) {
      rank.pipeline->gatherer().set_poison_released_slots(true);
      for (int step = 0; step < 3; ++step) {
        Stream& stream =
            delay_gather ? rank.pipeline->gatherer().stream() : rank.pipeline->reducer().stream();
        rank.lanes.device->delay(stream, std::chrono::milliseconds(20));
        const std::vector<int> order = rank.in_order();
        rank.backward(order, rank.forward(order), static_cast<float>(r));
        for (const auto& unit : rank.units) {
          unit->expect_gradient(0, 0.5F);
          unit->zero_grad();
          unit->change_shard();
        }
      }
    });
  }
}

TEST(Pipeline, ForwardsThatLeaveUnitsOutOrReorderThemStayRight) {
  on_ranks(2, 4, [](Rank& rank, int) {
    for (const std::vector<int>& order :
         std::vector<std::vector<int>>{{1, 2, 3, 4}, {1, 3, 4}, {4, 3, 2, 1}, {2}, {1, 2, 3, 4}}) {
      rank.backward(order, rank.forward(order), 1.0F);
      for (const auto& unit : rank.units) {
        EXPECT_FALSE(unit->is_attached());
        unit->zero_grad();
        unit->change_shard();
      }
    }
  });
}

TEST(Pipeline, AccumulatesWithoutSyncAndAddsToShardedGradients) {
  on_ranks(2, 2, [](Rank& rank, int r) {
    const std::vector<int> order = rank.in_order();
    const auto set_sync = [&](bool value) {
      for (int i = 0; i <= rank.layers(); ++i) {
        rank.pipeline->set_requires_gradient_sync(i, value);
      }
    };
    set_sync(false);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 0U);
    set_sync(true);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
    rank.backward(order, rank.forward(order), 2.0F);  // added to what is there
    for (const auto& unit : rank.units) {
      unit->expect_gradient(1, 3.0F);
    }
  });
}

TEST(Pipeline, MissingGradientsAreReducedAtTheEndAndLeftWithoutAGradient) {
  on_ranks(2, 2, [](Rank& rank, int) {
    const std::vector<int> calls = rank.forward(rank.in_order());
    rank.pipeline->begin_backward();
    rank.pipeline->pre_backward(2, calls[2]);
    rank.unit(2).add_gradient(0, 4.0F);
    rank.pipeline->gradient_arrived(2, 0);
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 0U);
    rank.pipeline->end_backward();
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 1U);
    rank.unit(2).expect_gradient(0, 4.0F);
    EXPECT_TRUE(rank.unit(2).has_sharded_gradient(0));
    EXPECT_FALSE(rank.unit(2).has_sharded_gradient(1));
    EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
  });
}

TEST(Pipeline, AnAbandonedForwardOrBackwardLeavesNoTrace) {
  on_ranks(2, 3, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(1);  // and the gather of unit 2 is on its way
    rank.step(1.0F);
    const std::vector<int> calls = rank.forward(rank.in_order());
    rank.pipeline->begin_backward();
    rank.pipeline->pre_backward(3, calls[3]);
    rank.unit(3).add_gradient(0, 100.0F);
    rank.pipeline->gradient_arrived(3, 0);
    const std::vector<int> order = rank.in_order();
    rank.backward(order, rank.forward(order), 1.0F);
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
  });
}

TEST(Pipeline, UnitsUnshardedByHandGetOverflowSlotsThatAreFreed) {
  on_ranks(2, 4, [](Rank& rank, int) {
    for (int i = 1; i <= 4; ++i) {
      rank.pipeline->unshard(i);
      rank.pipeline->wait_for_unshard(i);
    }
    for (int i = 1; i <= 4; ++i) {
      rank.unit(i).expect_unsharded();
    }
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 2U);
    for (int i = 1; i <= 4; ++i) {
      rank.pipeline->reshard(i);
    }
    const BufferRing* ring = rank.pipeline->gatherer().ring();
    EXPECT_EQ(ring->allocated_bytes(), 2 * ring->slot_bytes());
    rank.step(1.0F);
  });
}

TEST(Pipeline, ReentrantRecomputationsAreReducedTogether) {
  on_ranks(2, 1, [](Rank& rank, int) {
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    for (int call = 0; call < 2; ++call) {
      rank.pipeline->pre_forward(1);
      rank.pipeline->post_forward(1, /*with_gradient=*/false);
    }
    rank.pipeline->post_forward(0);
    rank.pipeline->end_forward();
    rank.pipeline->begin_backward();
    for (int call = 0; call < 2; ++call) {
      rank.pipeline->pre_forward(1);
      const int forward_call = rank.pipeline->post_forward(1);
      rank.pipeline->pre_backward(1, forward_call);
      rank.bring_gradients(1, 1.0F);
      rank.pipeline->post_backward(1);
    }
    EXPECT_EQ(rank.pipeline->ledger().counters().reduce_scatters, 1U);
    rank.pipeline->end_backward();
    rank.unit(1).expect_gradient(0, 2.0F);
  });
}

// - Buckets: six units, of which two fit one

void on_bucketed_ranks(int world_size, const std::function<void(Rank&, int)>& body,
                       GatherBy gather_by = GatherBy::Packing, int message_rows = 0) {
  on_ranks(world_size, 6, body, {}, gather_by, /*bucket_units=*/2, message_rows);
}

std::vector<std::vector<int>> buckets_of(const Rank& rank) {
  std::vector<std::vector<int>> buckets;
  for (const auto& bucket : rank.pipeline->buckets()) {
    buckets.emplace_back();
    for (const Unit* unit : bucket->units) {
      buckets.back().push_back(unit->number);
    }
  }
  return buckets;
}

struct Sent {
  std::vector<int> forward;  // first units of the buckets that were gathered
  std::vector<int> backward;
  std::vector<int> reduced;
};

Sent sent_by(Rank& rank, const std::function<void()>& body) {
  rank.pipeline->ledger().reset();
  rank.pipeline->ledger().enable_log(true);
  body();
  Sent sent;
  for (const CollectiveRecord& record : rank.pipeline->ledger().log()) {
    (record.op == Collective::ReduceScatter ? sent.reduced
     : record.phase == Phase::Forward       ? sent.forward
                                            : sent.backward)
        .push_back(record.units.first);
  }
  rank.pipeline->ledger().clear_log();
  return sent;
}

void expect_steps_train(Rank& rank, int r, int world_size,
                        const std::vector<std::function<Stream&()>>& late) {
  rank.pipeline->gatherer().set_poison_released_slots(true);
  for (int step = 0; step < 3; ++step) {
    for (const auto& stream : late) {
      rank.lanes.device->delay(stream(), std::chrono::milliseconds(5));
    }
    const std::vector<int> order = rank.in_order();
    rank.backward(order, rank.forward(order), static_cast<float>(r + 1 + step));
    const float mean = static_cast<float>(step) + static_cast<float>(world_size + 1) / 2.0F;
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, mean);
      unit->expect_gradient(1, mean);
      EXPECT_FALSE(unit->is_attached());
      unit->zero_grad();
      unit->change_shard();
    }
  }
}

constexpr GatherBy kAllWaysToGather[] = {GatherBy::Packing, GatherBy::Size, GatherBy::Parameter};

TEST_P(PipelineOnRanks, BucketsBringTheSameAsUnitsByThemselves) {
  const int world_size = GetParam();
  for (const GatherBy by : kAllWaysToGather) {
    on_bucketed_ranks(
        world_size,
        [&](Rank& rank, int r) {
          expect_steps_train(rank, r, world_size,
                             {[&]() -> Stream& { return rank.pipeline->gatherer().stream(); },
                              [&]() -> Stream& { return rank.pipeline->reducer().stream(); }});
          if (world_size > 1) {
            EXPECT_EQ(buckets_of(rank),
                      (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5, 6}}));
            EXPECT_EQ(rank.unit(1).moves(), 1);
            EXPECT_EQ(rank.unit(0).moves(), 0);
          }
        },
        by);
  }
}

// - Pieces

TEST_P(PipelineOnRanks, PiecesBringTheSameAsTheWhole) {
  const int world_size = GetParam();
  for (const GatherBy by : kAllWaysToGather) {
    for (const int message_rows : {1, 2, 3, 4, 5, 9, 100}) {
      on_bucketed_ranks(
          world_size, [&](Rank& rank, int r) { expect_steps_train(rank, r, world_size, {}); }, by,
          message_rows);
    }
  }
}

TEST(Pieces, DoNotDependOnHowLongAStreamTakes) {
  for (const GatherBy by : {GatherBy::Packing, GatherBy::Parameter}) {
    for (const char* late : {"gather", "reduce"}) {
      for (const int which : {0, 1, 2}) {
        on_bucketed_ranks(
            2,
            [&](Rank& rank, int r) {
              rank.forward(rank.in_order());
              rank.pipeline->reset_iteration();
              Lane& lane = lane_named(rank.lanes, late);
              expect_steps_train(
                  rank, r, 2, {[&]() -> Stream& {
                    return which == 0 ? lane.before() : which == 1 ? lane.stream() : lane.after();
                  }});
            },
            by, /*message_rows=*/2);
      }
    }
  }
}

TEST(Pieces, AreOneMessageEachAndSmallerBuffers) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
        // A chunk of four rows is one message.
        EXPECT_EQ(sent.forward, (std::vector<int>{0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5}));
        EXPECT_EQ(sent.reduced.size(), 14U);
        const std::size_t message = 4 * 2 * kColumns * sizeof(float);
        EXPECT_EQ(rank.pipeline->bucket_of(1).gathers.at(0).bytes, message);
        EXPECT_EQ(rank.pipeline->gatherer().staging_bytes(), 0U);  // each is a parameter
        EXPECT_EQ(rank.pipeline->reducer().buffer_bytes(), 2U * 256);
      },
      GatherBy::Packing, /*message_rows=*/4);
}

TEST(Pieces, AccumulateAndDifferAsTheWholeDoes) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int r) {
        const std::vector<int> order = rank.in_order();
        const auto train = [&] {
          rank.backward(order, rank.forward(order), static_cast<float>(r));
        };
        rank.pipeline->set_requires_gradient_sync(1, false);
        rank.pipeline->set_requires_gradient_sync(3, false);
        rank.pipeline->set_requires_gradient_sync(4, false);
        train();
        train();
        EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
        rank.unit(2).expect_gradient(0, 1.0F);
        rank.pipeline->set_requires_gradient_sync(1, true);
        rank.pipeline->set_requires_gradient_sync(2, false);
        train();
        rank.unit(1).expect_gradient(1, 1.5F);
        rank.unit(2).expect_gradient(1, 1.0F);
        for (int i = 1; i <= 6; ++i) {
          rank.pipeline->set_requires_gradient_sync(i, true);
        }
        train();
        for (int i = 1; i <= 6; ++i) {
          rank.unit(i).expect_gradient(0, 2.0F);
          rank.unit(i).expect_gradient(1, 2.0F);
        }
      },
      GatherBy::Packing, /*message_rows=*/3);
}

TEST(Pieces, AUnitDoesNotWaitForThoseBehindIt) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.step(1.0F);
        const Bucket& bucket = rank.pipeline->bucket_of(1);
        ASSERT_EQ(bucket.gathers.size(), 4U);
        EXPECT_EQ(rank.pipeline->unit(1).last_piece, 1U);
        EXPECT_EQ(rank.pipeline->unit(2).last_piece, 3U);
        rank.pipeline->unshard(1);
        Event& last = *bucket.gathers[3].gathered;
        rank.pipeline->wait_for_unshard(1);
        rank.unit(1).expect_unsharded();
        rank.pipeline->reshard(1);
        EXPECT_TRUE(last.query()) << "who comes next may write where the last piece would";
      },
      GatherBy::Packing, /*message_rows=*/4);
}

TEST(Pieces, ThatHaveNoRoomForARowAreRefused) {
  const UnitLayout layout = FakeUnit::make_layout(2, "w");
  try {
    layout.parts(Wire::Gather, 23);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    expect_contains(error.what(),
                    "max_message_bytes is 23. A message needs room for one row of parameter 'w0' "
                    "from each of 2 ranks: at least 24 bytes.");
  }
}

TEST(Buckets, AreGatheredAndReducedOnceForAllTheirUnits) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    for (int step = 0; step < 2; ++step) {
      const Sent sent = sent_by(rank, [&] { rank.step(1.0F); });
      EXPECT_EQ(sent.forward, (std::vector<int>{0, 1, 3, 5}));
      EXPECT_EQ(sent.backward, (std::vector<int>{1}));  // two are in the ring still
      EXPECT_EQ(sent.reduced, (std::vector<int>{5, 3, 1, 0}));
      const Counters& counters = rank.pipeline->ledger().counters();
      EXPECT_EQ(counters.reused_unshards, 2U);
      EXPECT_EQ(counters.overflow_slots, 0U);
      EXPECT_EQ(counters.peak_unsharded_units, 5);
      EXPECT_EQ(counters.unsharded_units, 0);
      EXPECT_EQ(counters.unsharded_bytes, 0U);
      const std::size_t of_one = rank.pipeline->unit(1).layout.unsharded_bytes();
      EXPECT_EQ(counters.peak_unsharded_bytes, 5 * of_one);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->slots(), 2);
      EXPECT_EQ(rank.pipeline->gatherer().ring()->slot_bytes(), 2 * of_one);
    }
  });
}

TEST(Buckets, FollowTheOrderThatForwardTakes) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    const std::vector<int> order = {6, 1, 5, 2, 4, 3};
    for (int step = 0; step < 4; ++step) {
      rank.backward(order, rank.forward(order), 1.0F);
      for (const auto& unit : rank.units) {
        unit->expect_gradient(1, 1.0F);
        unit->zero_grad();
        unit->change_shard();
      }
    }
    EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {4, 3}, {5, 2}, {6, 1}}));
    EXPECT_EQ(rank.unit(1).moves(), 2);
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
  });
}

TEST(Buckets, AForwardThatLeavesUnitsOutStillReducesAndLetsSlotsGo) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    for (const std::vector<int>& order :
         std::vector<std::vector<int>>{{1, 3, 4, 6}, {2, 5}, {6, 5, 4, 3, 2, 1}, {1, 2, 1, 2, 5}}) {
      rank.pipeline->ledger().reset();
      std::vector<int> calls = rank.forward(order);
      std::vector<int> once;
      for (const int unit : order) {
        if (std::find(once.begin(), once.end(), unit) == once.end()) {
          once.push_back(unit);
        }
      }
      rank.backward(once, calls, 3.0F);
      for (int i = 0; i <= 6; ++i) {
        const bool ran = i == 0 || std::find(once.begin(), once.end(), i) != once.end();
        EXPECT_EQ(rank.unit(i).has_sharded_gradient(0), ran);
        if (ran) {
          rank.unit(i).expect_gradient(0, 3.0F);
        }
        EXPECT_FALSE(rank.unit(i).is_attached());
        rank.unit(i).zero_grad();
        rank.unit(i).change_shard();
      }
      EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
      EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
    }
    const Sent sent = sent_by(rank, [&] {
      const std::vector<int> order = {1, 3, 4, 6};
      rank.backward(order, rank.forward(order), 1.0F);
    });
    EXPECT_EQ(sent.reduced, (std::vector<int>{5, 3, 1, 0}));  // not only at the end
  });
}

TEST(Buckets, UnitsThatDifferInSyncOrScaleAreReducedByThemselves) {
  on_bucketed_ranks(2, [](Rank& rank, int r) {
    rank.step(1.0F);
    const std::vector<int> order = rank.in_order();
    rank.pipeline->set_requires_gradient_sync(1, false);
    rank.pipeline->set_requires_gradient_sync(4, false);
    for (int step = 0; step < 2; ++step) {
      const std::vector<int> calls = rank.forward(order);
      if (step == 1) {
        rank.pipeline->set_gradient_scales(5, 1.0, 1.0);  // a sum, from here on
      }
      rank.backward(order, calls, static_cast<float>(r));
    }
    EXPECT_FALSE(rank.unit(1).has_sharded_gradient(0));
    rank.unit(2).expect_gradient(0, 1.0F);
    rank.unit(3).expect_gradient(1, 1.0F);
    rank.unit(5).expect_gradient(0, 1.5F);
    rank.unit(6).expect_gradient(0, 1.0F);
    rank.pipeline->set_requires_gradient_sync(1, true);
    rank.pipeline->set_requires_gradient_sync(2, false);
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    rank.unit(1).expect_gradient(0, 1.5F);
    rank.unit(2).expect_gradient(0, 1.0F);
    EXPECT_FALSE(rank.unit(4).has_sharded_gradient(1));
    for (int i = 1; i <= 6; ++i) {
      rank.pipeline->set_requires_gradient_sync(i, true);
    }
    rank.backward(order, rank.forward(order), static_cast<float>(r));
    rank.unit(1).expect_gradient(1, 2.0F);
    rank.unit(2).expect_gradient(1, 2.0F);
    rank.unit(4).expect_gradient(0, 2.0F);
    rank.unit(5).expect_gradient(0, 3.5F);
    // Since the scales differ, and nothing is accumulated any more, the two are not together.
    rank.forward(order);
    EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5}, {6}}));
  });
}

TEST(Buckets, AccumulateWithoutSyncAsOne) {
  on_bucketed_ranks(2, [](Rank& rank, int r) {
    const std::vector<int> order = rank.in_order();
    for (const bool sync : {false, false, true}) {
      for (int i = 0; i <= 6; ++i) {
        rank.pipeline->set_requires_gradient_sync(i, sync);
      }
      const Sent sent =
          sent_by(rank, [&] { rank.backward(order, rank.forward(order), static_cast<float>(r)); });
      EXPECT_EQ(sent.reduced.size(), sync ? 4U : 0U);
    }
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.5F);
    }
  });
}

TEST(Buckets, UnitsUnshardedByHandKeepTheirNeighboursOnlyUntilTheyAreResharded) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.pipeline->unshard(3);
    rank.pipeline->wait_for_unshard(3);
    rank.unit(3).expect_unsharded();
    rank.pipeline->unshard(4);
    rank.pipeline->wait_for_unshard(4);
    rank.unit(4).expect_unsharded();
    EXPECT_EQ(rank.pipeline->ledger().counters().all_gathers, 1U);
    rank.pipeline->reshard(3);
    rank.unit(4).expect_unsharded();
    rank.unit(4).change_shard();
    rank.unit(3).change_shard();
    rank.pipeline->unshard(3);  // another slot than that of the old values
    rank.pipeline->wait_for_unshard(3);
    rank.unit(3).expect_unsharded();
    EXPECT_EQ(rank.pipeline->ledger().counters().all_gathers, 2U);
    rank.pipeline->reshard(3);
    rank.pipeline->reshard(4);
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_bytes, 0U);
    rank.pipeline->unshard(5);  // unit 6 comes along, and goes with it
    rank.pipeline->reshard(5);
    EXPECT_EQ(rank.pipeline->ledger().counters().unsharded_units, 0);
    rank.step(1.0F);
    rank.step(1.0F);
    EXPECT_EQ(rank.pipeline->ledger().counters().overflow_slots, 0U);
  });
}

TEST(Buckets, ThatStayUnshardedAfterForwardAreReducedAndFollowNewShards) {
  on_bucketed_ranks(
      2,
      [](Rank& rank, int) {
        for (int i = 1; i <= 6; ++i) {
          rank.pipeline->set_reshard_after_forward(i, i > 4);
        }
        for (int step = 0; step < 3; ++step) {
          const std::vector<int> order = rank.in_order();
          const std::vector<int> calls = rank.forward(order);
          for (int i = 1; i <= 4; ++i) {
            rank.unit(i).expect_unsharded();
          }
          rank.backward(order, calls, 2.0F);
          for (const auto& unit : rank.units) {
            unit->expect_gradient(0, 2.0F);
            unit->zero_grad();
            unit->change_shard();
          }
        }
        EXPECT_EQ(buckets_of(rank), (std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5, 6}}));
      },
      GatherBy::Packing, 2);
}

TEST(Buckets, AnAbandonedIterationLeavesNoTrace) {
  on_bucketed_ranks(2, [](Rank& rank, int) {
    rank.step(1.0F);
    rank.step(1.0F);
    rank.pipeline->begin_forward();
    rank.pipeline->pre_forward(0);
    rank.pipeline->pre_forward(1);
    const std::vector<int> order = rank.in_order();
    const std::vector<int> calls = rank.forward(order);
    rank.pipeline->begin_backward();
    rank.pipeline->pre_backward(6, calls[6]);
    rank.bring_gradients(6, 100.0F);
    rank.pipeline->post_backward(6);  // unit 5's are missing
    rank.backward(order, rank.forward(order), 1.0F);
    for (const auto& unit : rank.units) {
      unit->expect_gradient(0, 1.0F);
    }
  });
}

// What each of two ranks that differ is told.
std::vector<std::string> messages_of_two_ranks(const std::function<void(int)>& body) {
  std::vector<std::future<std::string>> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r]() -> std::string {
      try {
        body(r);
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    }));
  }
  return {ranks[0].get(), ranks[1].get()};
}

TEST(Pipeline, TwoSchedulesShareTheLanesAndOneMayEndWhileTheOtherRuns) {
  on_ranks(2, 3, [](Rank& rank, int r) {
    auto other = std::make_unique<Pipeline>(rank.lanes, PipelineOptions{});
    FakeUnit unit(9, FakeUnit::make_layout(2, "other"), r);
    other->add_unit({"other", FakeUnit::make_layout(2, "other")}, unit);
    for (int step = 0; step < 3; ++step) {
      const std::vector<int> order = rank.in_order();
      const std::vector<int> calls = rank.forward(order);
      if (other != nullptr) {
        other->begin_forward();
        other->pre_forward(0);
        unit.expect_unsharded();
      }
      rank.backward(order, calls, static_cast<float>(r));
      for (const auto& each : rank.units) {
        each->expect_gradient(0, 1.0F / 2);
        each->zero_grad();
      }
      if (step == 1) {
        other->unshard(0);
        other.reset();  // with its gather in flight
      } else if (other != nullptr) {
        unit.expect_unsharded();
        other->reset_iteration();
      }
    }
  });
}

TEST(Pipeline, RanksThatRunOtherUnitsAreToldWhichRankAndUnit) {
  auto gather_point = std::make_shared<MeetingPoint>(2, kTimeout);
  auto reduce_point = std::make_shared<MeetingPoint>(2, kTimeout);
  const auto messages = messages_of_two_ranks([&](int r) {
    Rank rank(r, 2, 2, gather_point, reduce_point);
    rank.forward(r == 0 ? std::vector<int>{1, 2} : std::vector<int>{2, 1});
  });
  expect_contains(messages[0], "rank 0 issues the all-gather of unit 'unit1'");
  expect_contains(messages[0], "rank 1 issues the all-gather of unit 'unit2'");
  expect_contains(messages[1], "rank 0 issues the all-gather of unit 'unit1'");
}

TEST(Pipeline, AFailedCollectiveIsToldToWhoeverWaitsForIt) {
  PipelineOptions options;
  options.check_order = false;
  on_ranks(
      2, 2,
      [](Rank& rank, int) {
        rank.step(1.0F);
        rank.gather->fail_next("the cable is unplugged");
        try {
          rank.forward(rank.in_order());
          FAIL() << "expected the communicator's error";
        } catch (const std::exception& error) {
          expect_contains(error.what(), "the cable is unplugged");
        }
      },
      options);
}

TEST(Pipeline, APeerThatNeverComesEndsInAnErrorThatNamesTheUnit) {
  // The meeting point waits longer than the streams do, so theirs is the timeout that is seen.
  auto gather_point = std::make_shared<MeetingPoint>(2, std::chrono::milliseconds(400));
  auto reduce_point = std::make_shared<MeetingPoint>(2, std::chrono::milliseconds(400));
  PipelineOptions options;
  options.check_order = false;
  Lanes lanes = make_lanes(new ThreadsCommunicator(gather_point, 0), reduce_point, 0,
                           std::chrono::milliseconds(50));
  FakeUnit unit(0, FakeUnit::make_layout(2, "w"), 0);
  Pipeline pipeline(lanes, options);
  pipeline.add_unit({"lonely", FakeUnit::make_layout(2, "w")}, unit);
  pipeline.begin_forward();
  try {
    pipeline.pre_forward(0);
    FAIL() << "expected a timeout";
  } catch (const TimeoutError& error) {
    expect_contains(error.what(), "50 ms for the all-gather of unit 'lonely'");
  }
}

}  // namespace
}  // namespace fsdp::test
