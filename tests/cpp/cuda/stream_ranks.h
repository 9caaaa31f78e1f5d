// Ranks that are threads with CUDA streams, and units whose reads and writes run on the compute
// stream, for tests of the schedule on the CUDA side.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "change_settings.h"
#include "comm/nccl/nccl.h"
#include "core/schedule/pipeline.h"
#include "fake_cudart.h"
#include "fake_nccl.h"
#include "kernel_packer.h"

namespace fsdp::test {

constexpr std::chrono::milliseconds kTimeout{120000};
constexpr std::int64_t kRows[] = {7, 9, 40};
constexpr std::int64_t kColumns = 3;
constexpr std::size_t kParams = 3;

// - The streams and the memory of the framework

inline thread_local cudaStream_t compute_stream = nullptr;

inline void* current_stream(int /*device*/) { return compute_stream; }

// How much longer the work takes that writes this thread's new memory.
inline thread_local std::chrono::milliseconds allocation_delay{0};

// Work that is queued on the compute stream may still write new memory, and freed memory belongs to
// that stream.
inline std::shared_ptr<void> allocate_for(int /*device*/, std::size_t bytes, void* handle) {
  void* memory = std::malloc(bytes);
  auto* const stream = static_cast<cudaStream_t>(handle);
  enqueue(stream, [=, delay = allocation_delay] {
    std::this_thread::sleep_for(delay);
    std::memset(memory, 0xff, bytes);
  });
  return {memory, [stream, bytes](void* freed) {
            enqueue(stream, [=] {
              std::memset(freed, 0xff, bytes);
              std::free(freed);
            });
          }};
}

inline std::shared_ptr<void> allocate(std::size_t bytes) {
  return allocate_for(0, bytes, compute_stream);
}

// Of gradients that this thread has allocated and not freed.
struct LiveGradients {
  std::size_t bytes = 0;
  std::size_t most = 0;
};
inline thread_local LiveGradients live_gradients;

inline std::shared_ptr<void> allocate_gradient(std::size_t bytes) {
  live_gradients.bytes += bytes;
  live_gradients.most = std::max(live_gradients.most, live_gradients.bytes);
  std::shared_ptr<void> memory = allocate(bytes);
  void* const address = memory.get();
  return {address, [bytes, memory = std::move(memory)](void*) mutable {
            live_gradients.bytes -= bytes;
            memory.reset();
          }};
}

// Another stream of the framework is the current one.
class OnStream {
 public:
  explicit OnStream(cudaStream_t stream) : before_(std::exchange(compute_stream, stream)) {}
  ~OnStream() { compute_stream = before_; }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  cudaStream_t before_;
};

inline FakeNccl& fake() {
  static void* const handle = dlopen(FAKE_NCCL_LIBRARY, RTLD_NOW);
  return *reinterpret_cast<FakeNcclFunction*>(dlsym(handle, "fake_nccl"))();
}

inline const nccl::Api& api() {
  static const nccl::Api found = [] {
    setenv("FSDP_EXT_NCCL_SO", FAKE_NCCL_LIBRARY, 1);
    fake().enqueue = &enqueue;
    return nccl::find_library({});
  }();
  return found;
}

// - A unit on the compute stream

inline float value_of(int unit, int version, std::size_t param, std::int64_t element) {
  return static_cast<float>(1000 * unit + 100 * version + 10 * static_cast<int>(param)) +
         static_cast<float>(element) / 32.0F;
}

class StreamUnit final : public UnitPort {
 public:
  StreamUnit(int number, UnitLayout layout, int rank, std::atomic<int>& wrong)
      : number_(number),
        rank_(rank),
        wrong_(wrong),
        layout_(std::move(layout)),
        shard_(flat_memory(layout_.shard_bytes())),
        gradient_(flat_memory(gradient_bytes())) {
    run_where_flat([gradient = gradient(), numel = layout_.grad_numel()] {
      std::fill_n(gradient, numel, NAN);
    });
    write_shard();
  }

  void attach(void* unsharded) override { attached_ = static_cast<const float*>(unsharded); }
  void detach() override { attached_ = nullptr; }
  void show_sharded() override {}
  void show_unsharded() override {}
  void* flat_shard() override { return shard_.get(); }
  void* flat_gradient() override { return gradient_.get(); }
  void move_shard(std::shared_ptr<void> memory) override {
    move(shard_, std::move(memory), layout_.shard_bytes());
  }
  void move_gradient(std::shared_ptr<void> memory) override {
    move(gradient_, std::move(memory), gradient_bytes());
  }
  std::uint64_t shard_version() override { return static_cast<std::uint64_t>(seen_version_); }
  std::shared_ptr<void> extract_gradients(const void** addresses) override {
    auto taken = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(gradients_));
    gradients_.assign(kParams, nullptr);
    for (std::size_t i = 0; i < kParams; ++i) {
      addresses[i] = (*taken)[i].get();
    }
    return taken;
  }
  void discard_gradients() override { gradients_.assign(kParams, nullptr); }
  bool has_held_gradients() override { return is_gradient_held; }
  void renew_gradient(std::shared_ptr<void> memory) override { move_gradient(std::move(memory)); }
  bool uses_gradient_memory() override {
    return is_gradient_held || std::count(has_gradient_.begin(), has_gradient_.end(), true) > 0;
  }
  void set_gradient_memory(std::shared_ptr<void> memory) override {
    gradient_ = std::move(memory);
    if (gradient_ != nullptr) {
      run_where_flat([gradient = gradient(), numel = layout_.grad_numel()] {
        std::fill_n(gradient, numel, NAN);
      });
    }
  }
  bool has_sharded_gradient(std::size_t i) override { return has_gradient_[i]; }
  void import_sharded_gradient(std::size_t) override {}
  void discard_sharded_gradients() override { zero_grad(); }
  void set_sharded_gradient(std::size_t i) override { has_gradient_[i] = true; }

  bool is_gradient_held = false;  // by a user, after each step
  void zero_grad() { has_gradient_.assign(kParams, false); }

  // As an optimizer does: on the compute stream, or on the host if the unit is offloaded.
  void change_shard() {
    seen_version_ += 1;
    change_shard_unseen();
  }

  // As the replay of a captured optimizer does: the version stays.
  void change_shard_unseen() {
    version_ += 1;
    write_shard();
  }

  // As a kernel of forward or backward does, on the compute stream.
  void read_parameters() {
    ASSERT_NE(attached_, nullptr);
    enqueue(compute_stream, [this, data = attached_, version = version_] {
      for (std::size_t param = 0; param < kParams; ++param) {
        const ParamPlacement& place = layout_.placements()[param];
        const float* values = data + place.unsharded_offset / sizeof(float);
        for (std::int64_t i = 0; i < place.numel; ++i) {
          wrong_ += values[i] != value_of(number_, version, param, i) ? 1 : 0;
        }
      }
    });
  }

  // As backward does: memory of the framework, filled on the compute stream. Tests of captures keep
  // the memory, as a graph's own pool does. The gradients of each unit and parameter differ, or a
  // reduction that reads another one's input would not show.
  void add_gradient(std::size_t param, float value) {
    value *= scale_of(param);
    const auto numel = static_cast<std::size_t>(layout_.placements()[param].numel);
    std::shared_ptr<void>& memory = gradients_[param];
    if (kept_.empty()) {
      memory = allocate_gradient(numel * sizeof(float));
    } else {
      memory = kept_[param];
    }
    enqueue(compute_stream, [data = static_cast<float*>(memory.get()), numel, value] {
      std::fill_n(data, numel, value);
    });
  }

  void keep_gradients() {
    for (std::size_t param = 0; param < kParams; ++param) {
      kept_.push_back(
          allocate(static_cast<std::size_t>(layout_.placements()[param].numel) * sizeof(float)));
    }
  }

  // As an optimizer does, like change_shard.
  void read_gradients(float expected) {
    run_where_flat([this, expected, data = gradient()] {
      for (std::size_t param = 0; param < kParams; ++param) {
        const ParamPlacement& place = layout_.placements()[param];
        const std::int64_t count = layout_.rows(param, rank_).count * kColumns;
        for (std::int64_t i = 0; i < count; ++i) {
          const float got = data[place.grad_offset + i];
          const float wanted = expected * scale_of(param);
          wrong_ += std::fabs(got - wanted) <= 1e-5F * std::fabs(wanted) ? 0 : 1;
        }
      }
    });
  }

 private:
  float scale_of(std::size_t param) const {
    return static_cast<float>(1 + number_) + static_cast<float>(param) / 4.0F;
  }
  std::size_t gradient_bytes() const {
    return static_cast<std::size_t>(layout_.grad_numel()) * sizeof(float);
  }
  float* gradient() const { return static_cast<float*>(gradient_.get()); }

  // The shard's or the gradient's. See Note [offloaded units] in core/memory/layout.h.
  std::shared_ptr<void> flat_memory(std::size_t bytes) const {
    return layout_.is_offloaded() ? std::shared_ptr<void>(std::malloc(bytes), &std::free)
                                  : allocate(bytes);
  }
  void run_where_flat(std::function<void()> work) const {
    if (layout_.is_offloaded()) {
      work();
    } else {
      enqueue(compute_stream, std::move(work));
    }
  }

  // The old memory is freed after it was read.
  void move(std::shared_ptr<void>& from, std::shared_ptr<void> to, std::size_t bytes) const {
    if (from != nullptr) {
      run_where_flat([from, to, bytes] { std::memcpy(to.get(), from.get(), bytes); });
    }
    from = std::move(to);
  }

  void write_shard() {
    run_where_flat([this, version = version_, shard = shard_] {
      for (std::size_t param = 0; param < kParams; ++param) {
        const ParamPlacement& place = layout_.placements()[param];
        const std::int64_t first = layout_.rows(param, rank_).first * kColumns;
        const std::int64_t numel = layout_.rows(param, rank_).count * kColumns;
        for (std::int64_t i = 0; i < numel; ++i) {
          static_cast<float*>(
              shard.get())[place.shard_offset / sizeof(float) + static_cast<std::size_t>(i)] =
              value_of(number_, version, param, first + i);
        }
      }
    });
  }

  int number_;
  int rank_;
  std::atomic<int>& wrong_;
  int version_ = 0;
  int seen_version_ = 0;
  UnitLayout layout_;
  std::shared_ptr<void> shard_;
  std::shared_ptr<void> gradient_;
  std::vector<std::shared_ptr<void>> gradients_ = std::vector<std::shared_ptr<void>>(kParams);
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<bool> has_gradient_ = std::vector<bool>(kParams, false);
  const float* attached_ = nullptr;
};

// - One rank

inline UnitLayout make_layout(int world_size, const std::string& prefix, std::size_t direct_bytes,
                              bool is_offloaded, int times_rows = 1) {
  std::vector<ParamSpec> params(kParams);
  for (std::size_t i = 0; i < kParams; ++i) {
    params[i].name = prefix + std::to_string(i);
    params[i].rows = times_rows * kRows[kParams - 1 - i];  // large ones first
    params[i].row_numel = kColumns;
  }
  return {params, world_size, DType::Float32, DType::Float32, direct_bytes, is_offloaded};
}

struct Setting {
  int world_size;
  std::size_t direct_bytes;
  int bucket_units = 1;  // room in a bucket
  int message_rows = 0;  // room in a message, from each rank; 0: all
  int sets = 1;          // of so many ranks, each of which shards the model
  int group = 0;         // the ranks that units below the root are resharded to; 0: all
  int experts = 0;       // the ranks that share units 2 and 3: Note [several meshes]; 0: all
  bool is_offloaded = false;
  bool gathers_in_place = false;  // Note [gather inputs] in core/gather/gatherer.h
  bool only_first_in_place = false;
  int large = -1;      // a unit that is larger than the others
  int times_rows = 5;  // by so much
  // Reductions go by the switch, and their outputs have to be registered for that.
  bool reduces_by_switch = false;
  int gather_policy = nccl::kUndefined;

  int ranks() const { return world_size * sets; }
  bool is_expert(int unit) const { return experts > 0 && (unit == 2 || unit == 3); }
};

inline Setting by_switch(Setting setting) {
  setting.reduces_by_switch = true;
  return setting;
}

// What ranks connect by.
struct Ids {
  nccl::UniqueId of_set;
  nccl::UniqueId of_replicas;
  nccl::UniqueId of_group;
  nccl::UniqueId of_experts;
};

class Rank {
 public:
  // `number` is the rank's among all ranks: set after set.
  Rank(int number, Setting setting, const Ids& ids, int layers, std::atomic<int>& wrong) {
    compute_stream = new_stream("compute");
    const int rank = number % setting.world_size;
    lanes = connect(ids.of_set, rank, setting.world_size, setting.reduces_by_switch,
                    setting.gather_policy);
    if (setting.sets > 1) {
      replicas = connect(ids.of_replicas, number / setting.world_size, setting.sets);
    }
    if (setting.group > 0) {
      lanes->groups.push_back(connect(ids.of_group, rank % setting.group, setting.group));
    }
    if (setting.experts > 0) {
      add_experts(ids, rank, setting);
    }
    PipelineOptions options;
    const bool in_place = setting.gathers_in_place || (setting.only_first_in_place && number == 0);
    options.keeps_gather_inputs = !in_place;
    pipeline = std::make_unique<Pipeline>(*lanes, options, replicas.get());
    for (int i = 0; i <= layers; ++i) {
      const bool is_expert = setting.is_expert(i);
      const int size = is_expert ? setting.experts : setting.world_size;
      const std::string name = "unit" + std::to_string(i);
      const UnitLayout layout = make_layout(size, name, setting.direct_bytes, setting.is_offloaded,
                                            i == setting.large ? setting.times_rows : 1);
      units.push_back(std::make_unique<StreamUnit>(i, layout, rank % size, wrong));
      UnitConfig config{name, layout};
      config.mesh = is_expert ? 1 : 0;
      config.reshard_after_forward = i != 0;
      config.reshard_group = i != 0 ? setting.group : 0;
      config.pre_scale = 1.0 / (size * setting.sets);
      config.parent = i == 0 ? -1 : 0;
      config.bucket_bytes =
          static_cast<std::size_t>(setting.bucket_units * size) * layout.gather_bytes();
      const std::size_t limit =
          static_cast<std::size_t>(setting.message_rows * setting.world_size * kColumns) *
          sizeof(float);
      config.message_limits = {limit, limit};
      pipeline->units().add(std::move(config), *units.back());
    }
    pipeline->gatherer().set_poison_released_slots(true);
  }

  ~Rank() {
    pipeline.reset();
    units.clear();
    lanes.reset();
    replicas.reset();
    cudaStreamDestroy(compute_stream);  // after its work is done
    if (side_stream != nullptr) {
      cudaStreamDestroy(side_stream);
    }
  }

  void step(float gradient, float mean) {
    backward(forward(), gradient);
    for (auto& unit : units) {
      unit->read_gradients(mean);
      unit->zero_grad();
    }
  }

  // `entered` is called with each unit's number before its kernels.
  std::vector<CallId> forward(
      const std::function<void(int)>& entered = [](int) {}, bool with_gradient = true) {
    std::vector<CallId> calls(units.size(), kNoCall);
    pipeline->begin_forward(0, with_gradient);
    for (std::size_t i = 0; i < units.size(); ++i) {
      pipeline->pre_forward(static_cast<int>(i));
      entered(static_cast<int>(i));
      units[i]->read_parameters();
      if (i > 0) {
        calls[i] = pipeline->post_forward(static_cast<int>(i), with_gradient);
      }
    }
    calls[0] = pipeline->post_forward(0, with_gradient);
    pipeline->end_forward(with_gradient);
    return calls;
  }

  void evaluate() {
    forward([](int) {}, /*with_gradient=*/false);
  }

  // `passed` is called with each unit's number when backward has passed it.
  void backward(
      const std::vector<CallId>& calls, float gradient,
      const std::function<void(int)>& passed = [](int) {}) {
    pipeline->backward().begin_backward();
    for (int i = static_cast<int>(units.size()) - 1; i >= 0; --i) {
      StreamUnit& unit = *units[static_cast<std::size_t>(i)];
      pipeline->backward().pre_backward(i, calls[static_cast<std::size_t>(i)]);
      unit.read_parameters();
      for (std::size_t param = 0; param < kParams; ++param) {
        const OnStream on(param == side_param ? side_stream : compute_stream);
        unit.add_gradient(param, gradient);
        pipeline->backward().gradient_arrived(i, param);
      }
      pipeline->backward().post_backward(i, calls[static_cast<std::size_t>(i)]);
      passed(i);
    }
    pipeline->backward().end_backward();
  }

  void optimizer_step() {
    for (auto& unit : units) {
      unit->change_shard();
    }
  }

  // The gradients of this parameter of each unit are made on a stream of their own.
  void make_on_side_stream(std::size_t param) {
    side_param = param;
    if (side_stream == nullptr) {
      side_stream = new_stream("side");
    }
  }

  // Ranks share experts with their neighbours.
  void add_experts(const Ids& ids, int rank, const Setting& setting) {
    std::vector<int> members;
    for (int place = 0; place < setting.experts; ++place) {
      members.push_back(rank / setting.experts * setting.experts + place);
    }
    lanes->meshes.push_back(
        {connect(ids.of_experts, rank % setting.experts, setting.experts), members});
  }

  cudaStream_t side_stream = nullptr;
  std::size_t side_param = kParams;
  static std::unique_ptr<Lanes> connect(const nccl::UniqueId& id, int rank, int size,
                                        bool reduces_by_switch = false,
                                        int gather_policy = nccl::kUndefined) {
    auto device = make_cuda_device(0, kTimeout, {&current_stream, &allocate_for});
    NcclOptions options{rank, size, kTimeout, true};
    options.gather.cta_policy = gather_policy;
    options.driver = 13000;
    if (reduces_by_switch) {
      options.reduce.cta_policy = nccl::kEfficiencyPolicy;
    }
    auto [gather, reduce] = make_nccl_communicators(api(), *device, id, options);
    auto packer = std::make_unique<KernelPacker>(3, [](Stream& stream, std::function<void()> work) {
      enqueue(stream.native_handle(), std::move(work));
    });
    return std::make_unique<Lanes>(std::move(device), std::move(packer), std::move(gather),
                                   std::move(reduce));
  }

  std::unique_ptr<Lanes> lanes;
  std::unique_ptr<Lanes> replicas;  // null if there is one set
  std::vector<std::unique_ptr<StreamUnit>> units;
  std::unique_ptr<Pipeline> pipeline;
};

// Communicators that a graph has captured are closed by threads that nobody joins. A process that
// ends meanwhile may hang in the leak checker.
inline void wait_for_closers() {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (fake().live_communicators > 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), end)
        << fake().live_communicators << " communicators were not closed";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

inline void on_ranks(Setting setting, const std::function<void(Rank&, int)>& body) {
  std::vector<nccl::UniqueId> of_sets(static_cast<std::size_t>(setting.sets));
  std::vector<nccl::UniqueId> of_replicas(static_cast<std::size_t>(setting.world_size));
  std::vector<nccl::UniqueId> of_groups(static_cast<std::size_t>(setting.ranks()));
  std::vector<nccl::UniqueId> of_experts(static_cast<std::size_t>(setting.ranks()));
  for (auto* ids : {&of_sets, &of_replicas, &of_groups, &of_experts}) {
    for (nccl::UniqueId& id : *ids) {
      api().GetUniqueId(&id);
    }
  }
  std::atomic<int> wrong{0};
  std::vector<std::future<void>> ranks;
  for (int r = 0; r < setting.ranks(); ++r) {
    ranks.push_back(std::async(std::launch::async, [&, r] {
      const Ids ids{of_sets[static_cast<std::size_t>(r / setting.world_size)],
                    of_replicas[static_cast<std::size_t>(r % setting.world_size)],
                    of_groups[static_cast<std::size_t>(r / std::max(setting.group, 1))],
                    of_experts[static_cast<std::size_t>(r / std::max(setting.experts, 1))]};
      Rank rank(r, setting, ids, /*layers=*/4, wrong);
      body(rank, r);
      synchronize(compute_stream);
    }));
  }
  for (auto& rank : ranks) {
    EXPECT_NO_THROW(rank.get());
  }
  wait_for_closers();
  EXPECT_EQ(wrong, 0) << "elements that a kernel read were wrong";
}

// Waits until the streams of all lanes and the compute stream have done their work.
inline void synchronize_all(Rank& rank) {
  rank.lanes->gather.synchronize();
  rank.lanes->reduce.synchronize();
  if (rank.replicas != nullptr) {
    rank.replicas->gather.synchronize();
    rank.replicas->reduce.synchronize();
  }
  synchronize(compute_stream);
}

inline float mean_of(int world_size, int step) {
  float mean = 0.0F;
  for (int r = 0; r < world_size; ++r) {
    mean += static_cast<float>(r + 1 + step) / static_cast<float>(world_size);
  }
  return mean;
}

}  // namespace fsdp::test
