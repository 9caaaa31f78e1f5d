// csrc/comm/nccl/nccl_paths*: what each version of NCCL gets for each lane, and what it then runs.
#include "comm/nccl/nccl_paths.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nccl_ranks.h"

namespace fsdp {
namespace {

using test::fake;
using test::kNothingThrown;
using test::NcclRanks;

using std::chrono::milliseconds;

using nccl::kAutoPolicy;
using nccl::kEfficiencyPolicy;
using nccl::kUndefined;
using nccl::kZeroCtas;

constexpr int kDriver = 13000;

class NcclPaths : public NcclRanks {
 protected:
  LanePath path(int version, LaneUse use, int policy, int nodes = 1, int driver = kDriver,
                int size = 8) {
    use_version(version);
    NcclOptions options{/*rank=*/0, size};
    (use == LaneUse::Gathers ? options.gather : options.reduce).cta_policy = policy;
    options.nodes = nodes;
    options.driver = driver;
    return path_of_lane(api_, use, options);
  }

  std::string refusal(int version, int policy, int nodes = 1, int driver = kDriver, int size = 8) {
    return test::message_of([&] { path(version, LaneUse::Gathers, policy, nodes, driver, size); });
  }

  // All ranks gather `bytes` bytes each `times` times in a group, within buffers that have
  // `offsets`.
  void gather_parts(const nccl::LaneSettings& settings,
                    const std::vector<std::pair<std::size_t, std::size_t>>& offsets_and_bytes) {
    run_ranks(
        2,
        [&](Rank rank) {
          std::size_t whole = 0;
          for (const auto& [offset, bytes] : offsets_and_bytes) {
            whole = std::max(whole, offset + bytes);
          }
          const auto input = rank.gather.allocate(rank.device, whole, BufferUse::Shard);
          const auto output = rank.gather.allocate(rank.device, 2 * whole, BufferUse::Output);
          std::vector<GatherPart> parts;
          for (const auto& [offset, bytes] : offsets_and_bytes) {
            parts.push_back({static_cast<char*>(input.get()) + offset,
                             static_cast<char*>(output.get()) + 2 * offset, bytes});
          }
          rank.gather.all_gather_parts(rank.stream, parts);
        },
        milliseconds(20000), true, settings);
  }

  static void forget_paths() {
    fake().copied_gathers = fake().symmetric_kernels = 0;
    fake().switch_gathers = fake().ring_gathers = 0;
  }
};

// Version, number of nodes, policy that was asked for; then what the lane of gathers gets.
TEST_F(NcclPaths, OfGathersFollowTheVersionAndTheNodes) {
  struct Expected {
    int version, nodes, asked;
    int policy;
    bool symmetric_inputs, symmetric_outputs, cuts_groups;
  };
  const Expected table[] = {
      // Without a setting NCCL chooses, and windows are made where their kernels are safe.
      {22809, 1, kUndefined, kUndefined, false, false, false},
      {23006, 4, kUndefined, kUndefined, false, false, false},
      {23007, 1, kUndefined, kUndefined, true, true, false},
      {23007, 4, kUndefined, kUndefined, false, false, false},
      {23206, 4, kUndefined, kUndefined, true, true, false},
      {22809, 1, kEfficiencyPolicy, kEfficiencyPolicy, false, false, true},
      {23007, 1, kEfficiencyPolicy, kEfficiencyPolicy, true, true, false},
      // Copy engines need windows: of both buffers in 2.28.
      {22809, 1, kZeroCtas, kZeroCtas, true, true, false},
      {22902, 1, kZeroCtas, kZeroCtas, false, true, false},
      {23006, 1, kZeroCtas, kZeroCtas, false, true, false},
      {23007, 1, kZeroCtas, kZeroCtas, true, true, false},
      {23206, 4, kZeroCtas, kZeroCtas, true, true, false},
      // "auto" takes copy engines where they are safe.
      {22809, 1, kAutoPolicy, kZeroCtas, true, true, false},
      {22809, 2, kAutoPolicy, kUndefined, false, false, false},
      {23007, 1, kAutoPolicy, kZeroCtas, true, true, false},
      {23007, 2, kAutoPolicy, kUndefined, false, false, false},
      {23206, 2, kAutoPolicy, kEfficiencyPolicy, true, true, false},
  };
  for (const Expected& row : table) {
    const LanePath found = path(row.version, LaneUse::Gathers, row.asked, row.nodes);
    const std::string what = std::to_string(row.version) + " on " + std::to_string(row.nodes) +
                             " nodes, asked for " + std::to_string(row.asked);
    EXPECT_EQ(found.settings.cta_policy, row.policy) << what;
    for (const BufferUse use : {BufferUse::Input, BufferUse::Shard}) {
      EXPECT_EQ(found.is_symmetric(use), row.symmetric_inputs) << what;
    }
    for (const BufferUse use : {BufferUse::Output, BufferUse::Gradient}) {
      EXPECT_EQ(found.is_symmetric(use), row.symmetric_outputs) << what;
    }
    EXPECT_EQ(found.cuts_groups(), row.cuts_groups) << what;
  }
}

// On two ranks, these versions may hang in the first gather by copy engines, with any policy.
TEST_F(NcclPaths, OfGathersOfTwoRanksAvoidCopyEnginesFrom2290Until2312) {
  struct Expected {
    int version;
    int policy;  // that "auto" stands for
    bool has_windows_by_default;
    bool reduces_in_windows;
  };
  for (const Expected& row :
       {Expected{22809, kZeroCtas, false, false}, Expected{22907, kEfficiencyPolicy, false, false},
        Expected{23007, kEfficiencyPolicy, false, true}, Expected{23102, kZeroCtas, true, true}}) {
    const auto of_two = [&](LaneUse use, int policy) {
      return path(row.version, use, policy, /*nodes=*/1, kDriver, /*size=*/2);
    };
    const LanePath gathers = of_two(LaneUse::Gathers, kUndefined);
    EXPECT_EQ(gathers.symmetric_inputs, row.has_windows_by_default) << row.version;
    EXPECT_EQ(gathers.symmetric_outputs, row.has_windows_by_default) << row.version;
    EXPECT_EQ(of_two(LaneUse::Gathers, kAutoPolicy).settings.cta_policy, row.policy) << row.version;
    EXPECT_EQ(of_two(LaneUse::Reductions, kUndefined).symmetric_outputs, row.reduces_in_windows)
        << row.version;
    const std::string refused = refusal(row.version, kZeroCtas, 1, kDriver, /*size=*/2);
    EXPECT_EQ(refused == kNothingThrown, row.policy == kZeroCtas) << refused;
  }
  EXPECT_SAYS(refusal(23007, kZeroCtas, 1, kDriver, /*size=*/2),
              "NCCL 2.30.7 cannot do so on two ranks, whose first gather may hang. Upgrade NCCL");
}

TEST_F(NcclPaths, OfReductionsHaveNoWindowsWhereSymmetricKernelsAreNotSafe) {
  for (const int policy : {kUndefined, kEfficiencyPolicy, kAutoPolicy}) {
    for (const int version : {22809, 22907, 23006, 23007}) {
      const LanePath found = path(version, LaneUse::Reductions, policy);
      EXPECT_EQ(found.symmetric_inputs, version == 23007) << version;
      EXPECT_EQ(found.symmetric_outputs, version == 23007) << version;
      EXPECT_EQ(found.settings.cta_policy, policy == kUndefined ? kUndefined : kEfficiencyPolicy);
    }
  }
}

TEST_F(NcclPaths, KeepTheOtherSettingsOfALane) {
  use_version(22809);
  NcclOptions options{/*rank=*/0, /*size=*/8};
  options.gather.max_ctas = 8;
  options.gather.cta_policy = kAutoPolicy;
  const LanePath found = path_of_lane(api_, LaneUse::Gathers, options);
  EXPECT_EQ(found.settings.max_ctas, 8);
  EXPECT_EQ(found.settings.cta_policy, kEfficiencyPolicy);  // the driver is unknown
  options.register_buffers = false;
  EXPECT_EQ(path_of_lane(api_, LaneUse::Gathers, options).settings.cta_policy, kUndefined);
}

TEST_F(NcclPaths, AreRefusedIfTheVersionIsNotSafe) {
  EXPECT_SAYS(
      refusal(22809, kZeroCtas, /*nodes=*/2),
      "FSDP_EXT_NCCL_GATHER has cta_policy=zero, but NCCL 2.28.9 cannot do so between the 2 "
      "nodes of these ranks. Upgrade NCCL to 2.32.6 or newer, or choose another policy.");
  EXPECT_SAYS(refusal(23203, kZeroCtas, /*nodes=*/2),
              "NCCL 2.32.3 cannot do so between the 2 nodes of these ranks");
  EXPECT_SAYS(refusal(23006, kZeroCtas, 1, /*driver=*/12040),
              "NCCL 2.30.6 cannot do so with a driver older than CUDA 12.5");
}

// See Note [symmetric kernels].
TEST_F(NcclPaths, AreRefusedWhereVariablesLetKernelsRunTooEarly) {
  const auto refused_with = [&](const char* variable, const char* value, int version) {
    setenv(variable, value, 1);
    const std::string message = refusal(version, kUndefined);
    unsetenv(variable);
    return message;
  };
  const std::vector<std::pair<const char*, const char*>> unsafe = {
      {"NCCL_SYM_NOWIN_ENABLE", "1"},
      {"NCCL_SYM_KERNEL", "ReduceScatter_LL"},
      {"NCCL_SYM_KERNEL", "AllReduce_AGxLL_R"}};
  for (const auto& [variable, value] : unsafe) {
    for (const int version : {22907, 23006}) {
      EXPECT_SAYS(refused_with(variable, value, version),
                  std::string(variable) + "='" + value + "' lets NCCL 2.");
    }
    for (const int version : {22809, 23007}) {
      EXPECT_EQ(refused_with(variable, value, version), kNothingThrown);
    }
  }
  EXPECT_EQ(refused_with("NCCL_SYM_NOWIN_ENABLE", "0", 22907), kNothingThrown);
  EXPECT_EQ(refused_with("NCCL_SYM_KERNEL", "ReduceScatter_LD", 22907), kNothingThrown);
}

// See Note [blocking communicators].
TEST_F(NcclPaths, AreRefusedWhereAVariableMakesCommunicatorsNonBlocking) {
  for (const auto& [value, message] : std::vector<std::pair<const char*, std::string>>{
           {"0", "NCCL_COMM_BLOCKING='0' makes all NCCL communicators non-blocking"},
           {"1", kNothingThrown}}) {
    for (const int version : {22809, 23206}) {
      setenv("NCCL_COMM_BLOCKING", value, 1);
      EXPECT_SAYS(refusal(version, kUndefined), message);
      unsetenv("NCCL_COMM_BLOCKING");
    }
  }
}

// NCCL_CTA_POLICY overrides the settings of all communicators. FSDP2's documentation sets it to 2.
TEST_F(NcclPaths, FollowThePolicyOfNcclsVariable) {
  const auto path_with = [&](const char* value, LaneUse use, int version, int nodes = 1) {
    setenv("NCCL_CTA_POLICY", value, 1);
    return path(version, use, kUndefined, nodes);
  };
  EXPECT_EQ(path_with("2", LaneUse::Gathers, 22809).settings.cta_policy, kZeroCtas);
  EXPECT_TRUE(path_with("2", LaneUse::Gathers, 22809).symmetric_outputs);
  EXPECT_FALSE(path_with("2", LaneUse::Gathers, 22809, /*nodes=*/2).symmetric_outputs);
  EXPECT_FALSE(path_with("2", LaneUse::Reductions, 22809).symmetric_outputs);
  EXPECT_TRUE(path_with("1", LaneUse::Gathers, 22809).cuts_groups());
  EXPECT_TRUE(path_with("1", LaneUse::Reductions, 22809).registers_gradients());
  EXPECT_EQ(path_with("", LaneUse::Gathers, 22809).settings.cta_policy, kUndefined);
  setenv("NCCL_CTA_POLICY", "2", 1);
  EXPECT_EQ(refusal(22809, kZeroCtas), kNothingThrown);
  for (const int policy : {kEfficiencyPolicy, kAutoPolicy}) {
    EXPECT_SAYS(
        refusal(22809, policy),
        "NCCL_CTA_POLICY=2 overrides the cta_policy that FSDP_EXT_NCCL_GATHER sets. Unset one of "
        "the two variables.");
  }
  setenv("NCCL_CTA_POLICY", "ZERO", 1);
  EXPECT_SAYS(refusal(22809, kUndefined), "NCCL_CTA_POLICY is 'ZERO'. Pass 0 (default), 1");
  unsetenv("NCCL_CTA_POLICY");
}

// Otherwise a kernel could start before the stream's earlier work has ended.
TEST_F(NcclPaths, RunNoSymmetricKernelBefore2307) {
  nccl::LaneSettings copies;
  copies.cta_policy = kZeroCtas;
  for (const auto& settings : {nccl::LaneSettings{}, copies}) {
    for (const int version : {22809, 22907, 23004, 23007}) {
      use_version(version);
      forget_paths();
      run_ranks(
          3,
          [&](Rank rank) {
            const auto allocate = [&rank](Communicator& lane, BufferUse use) {
              return lane.allocate(rank.device, 4096, use);
            };
            const auto shard = allocate(rank.gather, BufferUse::Shard);
            const auto input = allocate(rank.gather, BufferUse::Input);
            const auto slot = allocate(rank.gather, BufferUse::Output);
            const auto made_in_step =
                rank.gather.allocate_alone(rank.device, 64, BufferUse::Output);
            rank.gather.all_gather(rank.stream, shard.get(), slot.get(), 1024);
            rank.gather.all_gather(rank.stream, input.get(), slot.get(), 1024);
            rank.gather.all_gather(rank.stream, input.get(), made_in_step.get(), 16);
            const auto packed = allocate(rank.reduce, BufferUse::Input);
            const auto gradient = allocate(rank.reduce, BufferUse::Gradient);
            rank.reduce.reduce_scatter(rank.stream, packed.get(), gradient.get(), 256,
                                       DType::Float32);
          },
          milliseconds(20000), true, settings);
      const bool copies_here = settings.cta_policy == kZeroCtas;
      EXPECT_EQ(fake().copied_gathers, copies_here ? 6 : 0) << version;
      if (version < 23007) {
        EXPECT_EQ(fake().symmetric_kernels, 0) << version;
      } else {
        EXPECT_GT(fake().symmetric_kernels, 0);
      }
      EXPECT_EQ(fake().misplaced_windows, 0);
    }
  }
}

// Each is the sum of a group, or one part that has its buffer to itself.
TEST_F(NcclPaths, CutGroupsWhereTheirSumWouldPassTheEndOfABuffer) {
  const char memory[100] = {};
  const auto left = [&](const void* address) {
    const auto offset = static_cast<const char*>(address) - memory;
    return offset < 100 ? static_cast<std::size_t>(100 - offset) : 0;
  };
  const auto groups = [&](const std::vector<std::pair<std::size_t, std::size_t>>& parts) {
    std::vector<GatherPart> all;
    for (const auto& [offset, bytes] : parts) {
      all.push_back({memory + offset, const_cast<char*>(memory), bytes});
    }
    return groups_in_buffers(all, 1, left);
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(groups({{0, 50}, {50, 50}}), (Sizes{1, 1}));
  EXPECT_EQ(groups({{0, 40}, {40, 20}, {60, 40}}), (Sizes{2, 1}));
  EXPECT_EQ(groups({{0, 10}, {10, 10}, {20, 10}}), (Sizes{3}));
  EXPECT_EQ(groups({{60, 20}, {0, 30}}), (Sizes{1, 1}));  // whichever is first
  EXPECT_EQ(groups({{0, 100}}), (Sizes{1}));
  EXPECT_EQ(groups({}), Sizes{});
  // The outputs of two ranks are twice as large.
  const std::vector<GatherPart> wide = {{memory, const_cast<char*>(memory), 30},
                                        {memory, const_cast<char*>(memory), 30}};
  EXPECT_EQ(groups_in_buffers(wide, 1, left), (Sizes{2}));
  EXPECT_EQ(groups_in_buffers(wide, 2, left), (Sizes{1, 1}));
}

// A layer of a transformer, in sixteenths of its widest matrix, in a slot that it fills.
TEST_F(NcclPaths, LetTheSwitchGatherAllPartsOfAGroup) {
  constexpr std::size_t kUnit = 4096;
  std::vector<std::pair<std::size_t, std::size_t>> parts;
  std::size_t offset = 0;
  for (const std::size_t size : {4U, 1U, 1U, 4U, 14U, 14U, 14U}) {
    parts.emplace_back(offset * kUnit, size * kUnit);
    offset += size;
  }
  nccl::LaneSettings few_blocks;
  few_blocks.cta_policy = kEfficiencyPolicy;
  forget_paths();
  fake().drain_calls();
  gather_parts(few_blocks, parts);
  EXPECT_EQ(fake().ring_gathers, 0);
  EXPECT_GE(fake().switch_gathers, 2 * 7);
  auto calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "group of 5"), 2);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "group of 1"), 2 * 2);
  // Other policies keep one launch.
  gather_parts({}, parts);
  calls = fake().drain_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "group of 7"), 2);
}

}  // namespace
}  // namespace fsdp
