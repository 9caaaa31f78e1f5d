// The arithmetic on one element, and the number of elements of a rank. Every packer uses these
// functions, on the host and on GPUs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/element.h"

namespace fsdp::body {

// The type of arithmetic between two element types.
template <typename A, typename B>
using Wide =
    std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

template <typename Destination, typename Source>
FSDP_HOST_DEVICE inline Destination convert(Source source, Wide<Source, Destination> scale) {
  using W = Wide<Source, Destination>;
  return element::narrow<Destination>(static_cast<W>(element::widen(source)) * scale);
}

template <typename Destination, typename Source>
FSDP_HOST_DEVICE inline Destination convert_and_add(Destination before, Source source,
                                                    Wide<Source, Destination> scale) {
  using W = Wide<Destination, Destination>;
  const Destination rounded = convert<Destination>(source, scale);
  return element::narrow<Destination>(static_cast<W>(element::widen(before)) +
                                      static_cast<W>(element::widen(rounded)));
}

// Returns how many of a parameter's `numel` elements are in the chunk of rank `rank`. Chunks have
// room for `chunk_numel` elements and begin `stride` apart.
FSDP_HOST_DEVICE inline std::int64_t elements_of_rank(std::int64_t numel, std::int64_t chunk_numel,
                                                      std::int64_t stride, int rank) {
  const std::int64_t left = numel - stride * rank;
  return left <= 0 ? 0 : (left < chunk_numel ? left : chunk_numel);
}

}  // namespace fsdp::body
