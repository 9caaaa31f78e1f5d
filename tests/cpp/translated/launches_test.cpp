// How many launches the packer for GPUs makes of a plan, and that it has a use for each kernel.
#include "launches.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels_under_test.h"

namespace fsdp {
namespace {

constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};

struct OneByOne {
  PackPlan plan;
  std::vector<const void*> gradients;
};

// A plan of entries of one element.
OneByOne one_by_one(int entries, const void* source, DType dtype) {
  OneByOne made{{{}, entries, 1, nullptr}, {}};
  for (std::int64_t i = 0; i < entries; ++i) {
    made.plan.entries.push_back({1, 1, i});
    made.gradients.push_back(static_cast<const char*>(source) +
                             static_cast<std::size_t>(i) * itemsize(dtype));
  }
  return made;
}

std::size_t launches_of_pack(int entries) {
  InlineStream compute(std::chrono::milliseconds(60000));
  const auto packer = test::make_kernels_under_test();
  std::vector<float> source(static_cast<std::size_t>(entries));
  std::iota(source.begin(), source.end(), 1.0F);
  auto [plan, gradients] = one_by_one(entries, source.data(), DType::Float32);
  std::vector<float> packed(source.size());
  packer->prepare(plan);
  const std::size_t before = test::launches();
  packer->pack(compute, plan, gradients.data(), DType::Float32, packed.data(), DType::Float32, 1.0,
               false, {});
  EXPECT_EQ(packed, source);
  return test::launches() - before;
}

TEST(Launches, AreSeveralIfTheArgumentsDoNotHoldAllEntries) {
  EXPECT_EQ(launches_of_pack(480), 1u);
  EXPECT_EQ(launches_of_pack(961), 3u);
}

// The GPU has ten multiprocessors here, and each runs one block at once.
TEST(Launches, OccupyNoMoreMultiprocessorsThanPackingMay) {
  InlineStream compute(std::chrono::milliseconds(60000));
  const auto device = make_host_device(std::chrono::milliseconds(60000));
  const test::LaunchesOn here(compute);
  constexpr std::int64_t kBytes = 2 << 20;
  const std::vector<char> staging(kBytes, 'x');
  for (const auto& [multiprocessors, blocks] :
       {std::pair(0, 10U), std::pair(9, 9U), std::pair(1, 1U)}) {
    const auto packer = make_cuda_packer(*device, multiprocessors);
    std::vector<char> unsharded(kBytes);
    UnpackPlan plan{{{kBytes, 0, 0}}, kBytes, 1, nullptr};
    packer->prepare(plan);
    packer->unpack(compute, plan, staging.data(), unsharded.data());
    compute.synchronize();
    EXPECT_EQ(test::blocks_of_last_launch(), blocks);
    EXPECT_EQ(unsharded, staging);
  }
}

// The others stay free for compute: the blocks wait for PCIe.
TEST(Launches, OccupyFewMultiprocessorsWhileTheyCrossPcie) {
  InlineStream compute(std::chrono::milliseconds(60000));
  const auto device = make_host_device(std::chrono::milliseconds(60000));
  const test::LaunchesOn here(compute);
  const std::vector<float> shard(1 << 19, 1.0F);
  for (const auto& [multiprocessors, crosses_pcie, blocks] :
       {std::tuple(0, false, 10U), std::tuple(0, true, 8U), std::tuple(1, true, 1U)}) {
    const auto packer = make_cuda_packer(*device, multiprocessors);
    std::vector<float> written(shard.size());
    CastPlan plan{{{0, 0, 1 << 19, DType::Float32, DType::Float32}}, nullptr, crosses_pcie};
    packer->prepare(plan);
    packer->cast(compute, plan, nullptr, shard.data(), written.data(), 1.0);
    compute.synchronize();
    EXPECT_EQ(test::blocks_of_last_launch(), blocks);
    EXPECT_EQ(written, shard);
  }
}

// 4 x 4 dtypes; bytes are cast but not packed.
TEST(Launches, EveryKernelOfThePackerIsLaunched) {
  InlineStream compute(std::chrono::milliseconds(60000));
  const auto packer = test::make_kernels_under_test();
  const std::vector<double> zeros(8);
  std::vector<double> written(8);
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      auto [plan, gradients] = one_by_one(1, zeros.data(), from);
      packer->prepare(plan);
      packer->pack(compute, plan, gradients.data(), from, written.data(), to, 1.0, false, {});
      CastPlan cast{{{0, 0, 1, from, to}}, nullptr};
      packer->prepare(cast);
      packer->cast(compute, cast, nullptr, zeros.data(), written.data(), 1.0);
    }
  }
  CastPlan bytes{{{0, 0, 1, DType::Bytes, DType::Bytes}}, nullptr};
  packer->prepare(bytes);
  packer->cast(compute, bytes, nullptr, zeros.data(), written.data(), 1.0);
  UnpackPlan plan{{{8, 0, 0}}, 8, 1, nullptr};
  packer->prepare(plan);
  packer->unpack(compute, plan, zeros.data(), written.data());

  int of_packer = 0;
  for (const ptx::Kernel& kernel : ptx::kernels()) {
    const std::string name = kernel.name;
    if (name.find("pack_kernel") != std::string::npos ||
        name.find("cast_kernel") != std::string::npos) {
      ++of_packer;
      EXPECT_EQ(test::launched_kernels().count(name), 1u) << name;
    }
  }
  EXPECT_EQ(of_packer, 34);
}

}  // namespace
}  // namespace fsdp
