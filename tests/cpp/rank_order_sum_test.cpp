// Sums of the ranks' inputs in shared memory.
#include "comm/shared_memory/rank_order_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "base/with_dtype.h"
#include "message_of.h"

namespace fsdp::test {
namespace {

constexpr DType kFloats[] = {DType::Float32, DType::BFloat16, DType::Float16, DType::Float64};

TEST(RankOrderSum, RoundsOnceAndInTheOrderOfRanks) {
  const std::uint16_t big = element::narrow<element::BFloat16>(256.0f).bits;
  const std::uint16_t one = element::narrow<element::BFloat16>(1.0f).bits;
  std::uint16_t result = 0;
  sum_in_rank_order({&big, &one, &one}, &result, 1, DType::BFloat16);
  EXPECT_EQ(element::widen(element::BFloat16{result}), 258.0f)
      << "one by one in bf16 it would be 256";
  const float values[] = {1e8f, 1.0f, -1e8f};
  float sum = -1.0f;
  sum_in_rank_order({&values[0], &values[1], &values[2]}, &sum, 1, DType::Float32);
  EXPECT_EQ(sum, 0.0f);
  sum_in_rank_order({&values[0], &values[2], &values[1]}, &sum, 1, DType::Float32);
  EXPECT_EQ(sum, 1.0f);
  EXPECT_NE(message_of([&] {
              sum_in_rank_order({&sum, &sum}, &sum, 1, DType::Bytes);
            }).find("floating dtype"),
            std::string::npos);
}

// Bit for bit, except that the sum of two NaNs is either of them, which the compiler chooses.
template <typename T>
bool is_same(T a, T b) {
  const auto wide_a = element::widen(a);
  const auto wide_b = element::widen(b);
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (wide_a != wide_a && wide_b != wide_b);
}

TEST(RankOrderSum, HasTheSameBitsWithEveryInstructionSet) {
  constexpr std::size_t kMost = 5000;  // elements; more than two blocks of the loops
  std::mt19937_64 random(5);
  std::vector<std::vector<std::uint64_t>> memory(5, std::vector<std::uint64_t>(kMost + 8));
  for (auto& source : memory) {
    std::generate(source.begin(), source.end(), std::ref(random));
  }
  for (const DType dtype : kFloats) {
    with_float(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (const std::size_t numel : {0, 1, 7, 31, 65, 2047, 2049, 5000}) {
        for (const std::size_t count : {2, 3, 5}) {
          std::vector<const void*> sources;
          for (std::size_t i = 0; i < count; ++i) {
            sources.push_back(reinterpret_cast<const T*>(memory[i].data()) + i);
          }
          std::vector<T> expected(numel + 1);
          sum_in_rank_order(sources, expected.data(), numel, dtype, InstructionSet::Baseline);
          for (const auto set : {InstructionSet::Avx2, InstructionSet::Avx512}) {
            if (!is_supported(set)) {
              continue;
            }
            std::vector<T> actual(numel + 1);
            sum_in_rank_order(sources, actual.data(), numel, dtype, set);
            for (std::size_t i = 0; i < numel; ++i) {
              ASSERT_TRUE(is_same(actual[i], expected[i]))
                  << name(dtype) << ", " << name(set) << ", element " << i << " of " << numel;
            }
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::test
