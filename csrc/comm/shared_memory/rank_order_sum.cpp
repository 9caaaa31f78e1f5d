#include "comm/shared_memory/rank_order_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/with_dtype.h"

namespace fsdp {
namespace {

// Elements at a time. Their sums stay in the nearest cache, and the processor prefetches the next
// block of each source.
constexpr std::size_t kBlock = 2048;

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// - Loops, see Note [instruction sets]. tools/check_vectorised.py reads the marks.

template <typename T>
struct AddTwoLoop {
  static FSDP_ALWAYS_INLINE void run(const T* __restrict first, const T* __restrict second,
                                     Sum<T>* __restrict sums, std::size_t numel) {
    // vectorised (baseline, AVX2, AVX-512): add two 4, 4, 4
    for (std::size_t i = 0; i < numel; ++i) {
      sums[i] = element::widen(first[i]) + element::widen(second[i]);
    }
  }
};

template <typename T>
struct AddLoop {
  static FSDP_ALWAYS_INLINE void run(const T* __restrict source, Sum<T>* __restrict sums,
                                     std::size_t numel) {
    // vectorised (baseline, AVX2, AVX-512): add 4, 4, 4
    for (std::size_t i = 0; i < numel; ++i) {
      sums[i] += element::widen(source[i]);
    }
  }
};

template <typename T>
struct RoundLoop {
  static FSDP_ALWAYS_INLINE void run(const Sum<T>* __restrict sums, T* __restrict output,
                                     std::size_t numel) {
    // vectorised (baseline, AVX2, AVX-512): round 2, 2, 2
    for (std::size_t i = 0; i < numel; ++i) {
      output[i] = element::narrow<T>(sums[i]);
    }
  }
};

template <typename T>
void sum(const std::vector<const void*>& sources, T* output, std::size_t numel,
         InstructionSet instruction_set) {
  alignas(64) Sum<T> block[kBlock];
  Sum<T>* const sums = block;
  const auto at = [&](std::size_t source, std::size_t first) {
    return static_cast<const T*>(sources[source]) + first;
  };
  for (std::size_t first = 0; first < numel; first += kBlock) {
    const std::size_t count = std::min(kBlock, numel - first);
    run_loop<AddTwoLoop<T>>(instruction_set, at(0, first), at(1, first), sums, count);
    for (std::size_t source = 2; source < sources.size(); ++source) {
      run_loop<AddLoop<T>>(instruction_set, at(source, first), sums, count);
    }
    run_loop<RoundLoop<T>>(instruction_set, static_cast<const Sum<T>*>(sums), output + first,
                           count);
  }
}

}  // namespace

void sum_in_rank_order(const std::vector<const void*>& sources, void* output, std::size_t numel,
                       DType dtype, InstructionSet instruction_set) {
  FSDP_CHECK(dtype != DType::Bytes,
             "a reduction got bytes. Pass a floating dtype; bytes cannot be added.");
  if (numel == 0) {
    return;  // memory of no bytes may be null
  }
  if (sources.size() == 1) {
    std::memmove(output, sources.front(), numel * itemsize(dtype));
    return;
  }
  with_float(dtype, [&](auto element) {
    using T = decltype(element);
    sum(sources, static_cast<T*>(output), numel, instruction_set);
  });
}

}  // namespace fsdp
