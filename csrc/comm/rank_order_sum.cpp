#include "comm/rank_order_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/with_dtype.h"

namespace fsdp {
namespace {

// Elements at a time: their sums stay in the nearest cache, and each source is read in pieces that
// the processor fetches ahead.
constexpr std::size_t kBlock = 2048;

template <typename T, typename Sum>
void sum_two(const T* __restrict first, const T* __restrict second, Sum* __restrict sums,
             std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    sums[i] = element::widen(first[i]) + element::widen(second[i]);
  }
}

template <typename T, typename Sum>
void add_to(const T* __restrict source, Sum* __restrict sums, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    sums[i] += element::widen(source[i]);
  }
}

template <typename T, typename Sum>
void round_sums(const Sum* __restrict sums, T* __restrict output, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    output[i] = element::narrow<T>(sums[i]);
  }
}

template <typename T>
void sum(const std::vector<const void*>& sources, T* output, std::size_t numel) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  alignas(64) Sum sums[kBlock];
  const auto at = [&](std::size_t source, std::size_t first) {
    return static_cast<const T*>(sources[source]) + first;
  };
  for (std::size_t first = 0; first < numel; first += kBlock) {
    const std::size_t count = std::min(kBlock, numel - first);
    sum_two(at(0, first), at(1, first), sums, count);
    for (std::size_t source = 2; source < sources.size(); ++source) {
      add_to(at(source, first), sums, count);
    }
    round_sums(sums, output + first, count);
  }
}

}  // namespace

void sum_in_rank_order(const std::vector<const void*>& sources, void* output, std::size_t numel,
                       DType dtype) {
  FSDP_CHECK(dtype != DType::Bytes, "a reduction expects a floating dtype but got bytes");
  if (sources.size() == 1) {
    std::memmove(output, sources.front(), numel * itemsize(dtype));
    return;
  }
  with_float(dtype, [&](auto element) {
    using T = decltype(element);
    sum(sources, static_cast<T*>(output), numel);
  });
}

}  // namespace fsdp
