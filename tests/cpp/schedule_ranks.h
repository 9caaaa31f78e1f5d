// Ranks that are threads and train units in plain memory, for tests of the schedule.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "change_settings.h"
#include "core/schedule/pipeline.h"
#include "threads_communicator.h"

namespace fsdp::test {

// Of waits that end. A busy machine may stop a thread for seconds.
constexpr std::chrono::milliseconds kTimeout{120000};
constexpr std::int64_t kRows = 7;  // not divisible by any number of ranks
constexpr std::int64_t kColumns = 3;

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\" in: " << text;
}

inline float value_of(int unit, int version, std::int64_t param, std::int64_t element) {
  return static_cast<float>(1000 * unit + 100 * version + 10 * param) +
         static_cast<float>(element) / 32.0F;
}

inline Lanes make_lanes(ThreadsCommunicator* gather, std::shared_ptr<MeetingPoint> reduce_point,
                        int rank, std::chrono::milliseconds timeout) {
  return {make_host_device(timeout), make_host_packer(), std::unique_ptr<Communicator>(gather),
          std::make_unique<ThreadsCommunicator>(std::move(reduce_point), rank)};
}

// A unit of two parameters in plain memory.
class FakeUnit final : public UnitPort {
 public:
  FakeUnit(int number, UnitLayout layout, int rank)
      : number_(number),
        rank_(rank),
        layout_(std::move(layout)),
        // One element more than needed, so that units are never adjacent by chance.
        shard_(new float[layout_.shard_bytes() / sizeof(float) + 1](),
               std::default_delete<float[]>()),
        gradient_(new float[static_cast<std::size_t>(layout_.grad_numel()) + 1],
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
  void show_sharded() override {}
  void show_unsharded() override {}
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
  void discard_gradients() override { gradients_.assign(2, {}); }
  bool has_held_gradients() override { return false; }
  void renew_gradient(std::shared_ptr<void> memory) override { move_gradient(std::move(memory)); }
  bool uses_gradient_memory() override { return true; }
  void set_gradient_memory(std::shared_ptr<void> memory) override { gradient_ = std::move(memory); }
  bool has_sharded_gradient(std::size_t i) override { return has_gradient_[i]; }
  void import_sharded_gradient(std::size_t) override {}
  void discard_sharded_gradients() override { zero_grad(); }
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

  // The unit is attached to the whole parameters.
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
    const std::int64_t rows = layout_.rows(param, rank_).count;
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
      const std::int64_t first = layout_.rows(param, rank_).first * kColumns;
      const std::int64_t numel = layout_.rows(param, rank_).count * kColumns;
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
      config.pre_scale = 1.0 / world_size;
      config.parent = i == 0 ? -1 : 0;
      config.bucket_bytes =
          static_cast<std::size_t>(bucket_units * world_size) * config.layout.gather_bytes();
      const std::size_t limit =
          static_cast<std::size_t>(message_rows * world_size * kColumns) * sizeof(float);
      config.message_limits = {limit, limit};
      pipeline->units().add(std::move(config), *units[static_cast<std::size_t>(i)]);
    }
    pipeline->gatherer().set_poison_released_slots(false);
  }

  int layers() const { return static_cast<int>(units.size()) - 1; }
  FakeUnit& unit(int i) { return *units[static_cast<std::size_t>(i)]; }

  // Returns the call of each unit that ran.
  std::vector<CallId> forward(const std::vector<int>& order) {
    std::vector<CallId> calls(units.size(), kNoCall);
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

  void backward(const std::vector<int>& order, const std::vector<CallId>& calls, float gradient,
                const BackwardGraph& graph = {}) {
    pipeline->backward().begin_backward(/*may_reshard=*/true, graph);
    pipeline->backward().pre_backward(0, calls[0]);
    for (auto i = order.rbegin(); i != order.rend(); ++i) {
      pipeline->backward().pre_backward(*i, calls[static_cast<std::size_t>(*i)]);
      unit(*i).expect_unsharded();
      add_gradients(*i, gradient);
      pipeline->backward().post_backward(*i, calls[static_cast<std::size_t>(*i)]);
    }
    add_gradients(0, gradient);
    pipeline->backward().end_backward();
  }

  void add_gradients(int i, float gradient) {
    for (std::size_t param = 0; param < 2; ++param) {
      unit(i).add_gradient(param, gradient);
      pipeline->backward().gradient_arrived(i, param);
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

// Runs `body` once on each rank's thread. An exception of any rank fails the test.
inline void on_ranks(int world_size, int layers, const std::function<void(Rank&, int)>& body,
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

// - Six units. A bucket has room for two.

inline void on_bucketed_ranks(int world_size, const std::function<void(Rank&, int)>& body,
                              GatherBy gather_by = GatherBy::Packing, int message_rows = 0) {
  on_ranks(world_size, 6, body, {}, gather_by, /*bucket_units=*/2, message_rows);
}

inline std::vector<std::vector<int>> buckets_of(const Rank& rank) {
  std::vector<std::vector<int>> buckets;
  for (const auto& bucket : rank.pipeline->units().buckets()) {
    buckets.emplace_back();
    for (const Unit* unit : bucket->units) {
      buckets.back().push_back(unit->number);
    }
  }
  return buckets;
}

struct Sent {
  std::vector<int> forward;  // the first units of the buckets that were gathered
  std::vector<int> backward;
  std::vector<int> reduced;
};

inline Sent sent_by(Rank& rank, const std::function<void()>& body) {
  rank.pipeline->ledger().reset();
  rank.pipeline->ledger().enable_log(true);
  body();
  Sent sent;
  for (const CollectiveRecord& record : rank.pipeline->ledger().take_log()) {
    (record.op == Collective::ReduceScatter ? sent.reduced
     : record.phase == Phase::Forward       ? sent.forward
                                            : sent.backward)
        .push_back(record.units.first);
  }
  return sent;
}

inline void expect_steps_train(Rank& rank, int r, int world_size,
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

}  // namespace fsdp::test
