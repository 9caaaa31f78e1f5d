// The bodies of the three kernels: what one lane of one warp does. They are plain functions of
// pointers and of the lane's place in the grid, without shared memory or barriers. pack_cuda.cu
// wraps them into kernels, and the C++ tests run them lane by lane on the host.
//
// Note [groups]
// A lane moves groups of elements. A group fills 16 bytes of the narrower side. It starts at a
// multiple of 16 bytes of the destination, so it is stored with 16-byte stores. Its source may have
// any alignment, so a lane reads the aligned 16-byte words that enclose the group and shifts them
// into place. Nothing outside the source is ever read: a group is moved element by element if its
// words reach beyond the source, or if it crosses the end of a run or of the data. A run has a few
// such groups at its ends and none in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pack/pack.h"
#include "pack/pack_body.h"
#include "pack/pack_table.h"

#if defined(__CUDACC__)
#define FSDP_UNROLL _Pragma("unroll")
#else
#define FSDP_UNROLL
#endif

namespace fsdp::kernels {

constexpr int kLanes = 32;
constexpr int kWordBytes = 16;

// A lane's place: `warp` of `warps` in the whole grid.
struct Place {
  std::uint32_t warp;
  std::uint32_t warps;
  int lane;
};

// A table where the kernel can read it.
struct TableView {
  const CopyRange* ranges;
  const std::uint32_t* range_of_tile;
  std::uint32_t first_tile;  // of those to do
  std::uint32_t tiles;       // to do, in one segment
};

// - 16 bytes at a time

struct alignas(kWordBytes) Word {
  std::uint32_t part[4];
};

// Written in PTX, since the compiler cannot tell that an address computed with integers points to
// global memory.
FSDP_HOST_DEVICE inline Word load_word(const void* address) {
  Word word;
#if defined(__CUDA_ARCH__)
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(word.part[0]), "=r"(word.part[1]), "=r"(word.part[2]), "=r"(word.part[3])
      : "l"(address));
#else
  std::memcpy(&word, __builtin_assume_aligned(address, kWordBytes), sizeof(word));
#endif
  return word;
}

FSDP_HOST_DEVICE inline void store_word(void* address, const Word& word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(word.part[0]), "r"(word.part[1]), "r"(word.part[2]),
                 "r"(word.part[3])
               : "memory");
#else
  std::memcpy(__builtin_assume_aligned(address, kWordBytes), &word, sizeof(word));
#endif
}

FSDP_HOST_DEVICE inline std::uint32_t funnel_shift(std::uint32_t low, std::uint32_t high,
                                                   int bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, bits);
#else
  return bits == 0 ? low : (low >> bits) | (high << (32 - bits));
#endif
}

// Moves everything down by `bytes` (0 to 15), in steps of fixed distances, since registers cannot
// be indexed.
template <int kParts>
FSDP_HOST_DEVICE inline void shift_down(std::uint32_t (&part)[kParts], int bytes) {
  FSDP_UNROLL
  for (int i = 0; i + 2 < kParts; ++i) {
    part[i] = (bytes & 8) != 0 ? part[i + 2] : part[i];
  }
  FSDP_UNROLL
  for (int i = 0; i + 1 < kParts; ++i) {
    part[i] = (bytes & 4) != 0 ? part[i + 1] : part[i];
  }
  FSDP_UNROLL
  for (int i = 0; i + 1 < kParts; ++i) {
    part[i] = funnel_shift(part[i], part[i + 1], (bytes & 3) * 8);
  }
}

FSDP_HOST_DEVICE inline int misalignment(const void* address) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(address) % kWordBytes);
}

// - Where elements come from

// Runs at a fixed distance from each other: the gradients of pack, and the single run of cast.
struct StridedRuns {
  std::int64_t first;
  std::int64_t stride;

  FSDP_HOST_DEVICE std::int64_t start(std::int64_t run) const { return first + run * stride; }
};

// Runs that alternate between the ranks' segments: the staging buffer of unpack.
struct RankMajorRuns {
  std::int64_t first;
  std::int64_t segment;
  std::int64_t run;
  std::int64_t world_size;

  FSDP_HOST_DEVICE std::int64_t start(std::int64_t number) const {
    return first + number % world_size * segment + number / world_size * run;
  }
};

template <typename S, typename Runs>
struct Source {
  const S* base;
  const void* begin;  // memory that may be read: [begin, end)
  const void* end;
  std::int64_t run;  // elements
  Runs runs;
};

// - One tile

enum class Action : std::uint8_t { Write, Add, Copy };  // Copy: Write where no bit changes

template <typename D, typename S>
struct Target {
  D* base;
  std::int64_t extent;  // elements to write
  std::int64_t valid;   // elements of the source; the rest is padding
  Action action;
  body::Wide<S, D> scale;
};

struct Byte {
  std::uint8_t bits;
};

// The arithmetic of one element. Bytes are copied.
template <typename D, typename S, typename W>
FSDP_HOST_DEVICE inline D convert_or_copy(S source, W scale) {
  if constexpr (std::is_same_v<D, Byte>) {
    return source;
  } else {
    return body::convert<D>(source, scale);
  }
}

template <typename D, typename S, typename W>
FSDP_HOST_DEVICE inline D accumulate_or_copy(D before, S source, W scale) {
  if constexpr (std::is_same_v<D, Byte>) {
    return source;
  } else {
    return body::convert_and_add(before, source, scale);
  }
}

template <typename S, typename D>
struct Group {
  static constexpr int kSize =
      kWordBytes / static_cast<int>(sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  static constexpr int kSourceWords = kSize * static_cast<int>(sizeof(S)) / kWordBytes;
  static constexpr int kTargetWords = kSize * static_cast<int>(sizeof(D)) / kWordBytes;
  // Groups that a lane has in flight: 64 bytes of the wider side.
  static constexpr int kInFlight = 4 / (kSourceWords > kTargetWords ? kSourceWords : kTargetWords);
  static constexpr int kParts = 4 * (kSourceWords + 1);
};

// - What a lane looks for in the elements that it moves

struct NoLook {
  template <typename S>
  FSDP_HOST_DEVICE void at(S /*element*/) {}
};

// A finite element times zero is zero. NaN and Inf become NaN, and so does the sum.
template <typename S>
class NonfiniteLook {
 public:
  FSDP_HOST_DEVICE void at(S element) { sum_ += element::widen(element) * Wide{0}; }
  FSDP_HOST_DEVICE bool found() const { return sum_ != Wide{0}; }

 private:
  using Wide = body::Wide<S, S>;

  Wide sum_{0};
};

template <typename S, typename D, typename Runs, typename Look>
class TileMover {
 public:
  using G = Group<S, D>;

  FSDP_HOST_DEVICE TileMover(const Source<S, Runs>& source, const Target<D, S>& target, Look& look)
      : source_(source), target_(target), look_(look) {}

  // Moves the tile that starts `start` elements after the last multiple of 16 bytes before the
  // target.
  FSDP_HOST_DEVICE void move(std::int64_t start, std::int64_t elements, int lane) const {
    const std::int64_t begin =
        start - misalignment(target_.base) / static_cast<std::int64_t>(sizeof(D));
    constexpr std::int64_t kRow = static_cast<std::int64_t>(kLanes) * G::kSize;
    const std::int64_t left = target_.extent - begin;
    const std::int64_t rows_end = left < elements ? left : elements;
    Cursor cursor = at(begin + lane * G::kSize);
    for (std::int64_t row = 0; row < rows_end; row += kRow * G::kInFlight) {
      std::uint32_t parts[G::kInFlight][G::kParts] = {};
      int shift[G::kInFlight] = {};
      std::int64_t first[G::kInFlight];
      unsigned loaded = 0;
      FSDP_UNROLL
      for (int i = 0; i < G::kInFlight; ++i) {
        first[i] = cursor.element;
        if (load(cursor, parts[i], shift[i])) {
          loaded |= 1u << i;
        }
        advance(cursor, kRow);
      }
      FSDP_UNROLL
      for (int i = 0; i < G::kInFlight; ++i) {
        if ((loaded >> i & 1u) != 0) {
          store(first[i], parts[i], shift[i]);
        }
      }
      for (int i = 0; i < G::kInFlight; ++i) {
        if ((loaded >> i & 1u) == 0) {
          if (is_padding(first[0] + i * kRow)) {
            zero(first[0] + i * kRow);
          } else {
            one_by_one(first[0] + i * kRow);
          }
        }
      }
    }
  }

 private:
  // An element of the target. In the source it is element `within` of run `run`.
  struct Cursor {
    std::int64_t element;
    std::int64_t run;
    std::int64_t within;
    std::int64_t start;  // of the run, in the source
  };

  FSDP_HOST_DEVICE Cursor at(std::int64_t element) const {
    Cursor cursor{element, 0, element, source_.runs.start(0)};
    wrap(cursor);
    return cursor;
  }

  FSDP_HOST_DEVICE void advance(Cursor& cursor, std::int64_t elements) const {
    cursor.element += elements;
    cursor.within += elements;
    wrap(cursor);
  }

  // Only the few elements that cross the end of a run need the divisions.
  FSDP_HOST_DEVICE void wrap(Cursor& cursor) const {
    if (cursor.within >= source_.run) {
      cursor.run += cursor.within / source_.run;
      cursor.within %= source_.run;
      cursor.start = source_.runs.start(cursor.run);
    }
  }

  FSDP_HOST_DEVICE const S* source_of(const Cursor& cursor) const {
    return source_.base + cursor.start + cursor.within;
  }

  // Reads a group. Returns false if Note [groups] forbids it.
  FSDP_HOST_DEVICE bool load(const Cursor& cursor, std::uint32_t (&parts)[G::kParts],
                             int& shift) const {
    if (cursor.element < 0 || cursor.element + G::kSize > target_.valid ||
        cursor.within > source_.run - G::kSize) {
      return false;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(source_of(cursor));
    shift = static_cast<int>(address % kWordBytes);
    const std::uintptr_t first = address - static_cast<std::uintptr_t>(shift);
    const int words = G::kSourceWords + (shift != 0 ? 1 : 0);
    if (first < reinterpret_cast<std::uintptr_t>(source_.begin) ||
        first + static_cast<std::uintptr_t>(words) * kWordBytes >
            reinterpret_cast<std::uintptr_t>(source_.end)) {
      return false;
    }
    FSDP_UNROLL
    for (int w = 0; w < G::kSourceWords + 1; ++w) {
      Word word{};
      if (w < words) {
        word = load_word(
            reinterpret_cast<const void*>(first + static_cast<std::uintptr_t>(w) * kWordBytes));
      }
      FSDP_UNROLL
      for (int i = 0; i < 4; ++i) {
        parts[w * 4 + i] = word.part[i];
      }
    }
    return true;
  }

  FSDP_HOST_DEVICE void store(std::int64_t first, std::uint32_t (&parts)[G::kParts],
                              int shift) const {
    if (shift != 0) {
      shift_down(parts, shift);
    }
    D* target = target_.base + first;
    Word words[G::kTargetWords] = {};
    if (target_.action == Action::Add) {
      FSDP_UNROLL
      for (int w = 0; w < G::kTargetWords; ++w) {
        words[w] = load_word(reinterpret_cast<const char*>(target) + w * kWordBytes);
      }
    }
    S from[G::kSize];
    std::memcpy(from, parts, sizeof(from));
    FSDP_UNROLL
    for (int i = 0; i < G::kSize; ++i) {
      look_.at(from[i]);
    }
    if (std::is_same_v<S, D> && target_.action == Action::Copy) {
      std::memcpy(words, parts, sizeof(words));
    } else {
      D to[G::kSize];
      std::memcpy(to, words, sizeof(to));
      FSDP_UNROLL
      for (int i = 0; i < G::kSize; ++i) {
        to[i] = target_.action == Action::Add ? accumulate_or_copy<D>(to[i], from[i], target_.scale)
                                              : convert_or_copy<D>(from[i], target_.scale);
      }
      std::memcpy(words, to, sizeof(words));
    }
    FSDP_UNROLL
    for (int w = 0; w < G::kTargetWords; ++w) {
      store_word(reinterpret_cast<char*>(target) + w * kWordBytes, words[w]);
    }
  }

  FSDP_HOST_DEVICE bool is_padding(std::int64_t first) const {
    return first >= target_.valid && first >= 0 && first + G::kSize <= target_.extent;
  }

  FSDP_HOST_DEVICE void zero(std::int64_t first) const {
    if (target_.action == Action::Add) {
      return;
    }
    FSDP_UNROLL
    for (int w = 0; w < G::kTargetWords; ++w) {
      store_word(reinterpret_cast<char*>(target_.base + first) + w * kWordBytes, Word{});
    }
  }

  FSDP_HOST_DEVICE void one_by_one(std::int64_t first) const {
    for (int i = 0; i < G::kSize && first + i < target_.extent; ++i) {
      const std::int64_t position = first + i;
      if (position < 0) {
        continue;
      }
      D* target = target_.base + position;
      if (position < target_.valid) {
        const S from = *source_of(at(position));
        look_.at(from);
        if (target_.action == Action::Add) {
          *target = accumulate_or_copy<D>(*target, from, target_.scale);
        } else if (target_.action == Action::Write) {
          *target = convert_or_copy<D>(from, target_.scale);
        } else if constexpr (std::is_same_v<S, D>) {
          *target = from;
        }
      } else if (target_.action != Action::Add) {
        *target = D{};
      }
    }
  }

  const Source<S, Runs>& source_;
  const Target<D, S>& target_;
  Look& look_;
};

template <typename S, typename D>
FSDP_HOST_DEVICE inline Action action_of(bool accumulate, double scale) {
  return accumulate                             ? Action::Add
         : std::is_same_v<S, D> && scale == 1.0 ? Action::Copy
                                                : Action::Write;
}

// - The kernels

struct PackWork {
  TableView table;
  std::int64_t segment_numel;
  std::int64_t world_size;
  void* reduce_input;
  double scale;
  bool accumulate;
  NonfiniteMarks marks;
};

// All lanes that find NaN or Inf in an entry write the same mark. `gradients(entry)` returns the
// address of the entry's gradient, which is an argument of the kernel.
template <typename S, typename D, typename Gradients>
FSDP_HOST_DEVICE inline void pack(const PackWork& work, const Gradients& gradients, Place place) {
  const std::uint64_t tiles =
      static_cast<std::uint64_t>(work.table.tiles) * static_cast<std::uint64_t>(work.world_size);
  for (std::uint64_t tile = place.warp; tile < tiles; tile += place.warps) {
    const auto rank = static_cast<std::int64_t>(tile / work.table.tiles);
    const std::uint32_t in_segment =
        work.table.first_tile + static_cast<std::uint32_t>(tile % work.table.tiles);
    const CopyRange range = work.table.ranges[work.table.range_of_tile[in_segment]];
    const S* gradient =
        range.entry == kNoEntry ? nullptr : static_cast<const S*>(gradients(range.entry));
    if (gradient == nullptr && work.accumulate) {
      continue;
    }
    const Source<S, StridedRuns> source{gradient,
                                        gradient,
                                        gradient + range.numel,
                                        range.run,
                                        {rank * range.stride, work.world_size * range.run}};
    const Target<D, S> target{
        static_cast<D*>(work.reduce_input) + rank * work.segment_numel + range.destination,
        range.extent,
        gradient == nullptr ? 0
                            : body::elements_of_rank(range.numel, range.chunk, range.stride,
                                                     static_cast<int>(rank)),
        action_of<S, D>(work.accumulate, work.scale), static_cast<body::Wide<S, D>>(work.scale)};
    NonfiniteLook<S> look;
    TileMover<S, D, StridedRuns, NonfiniteLook<S>>(source, target, look)
        .move(static_cast<std::int64_t>(in_segment - range.first_tile) * kTileElements,
              kTileElements, place.lane);
    if (look.found() && work.marks.of_entries != nullptr) {
      work.marks.of_entries[range.entry] = work.marks.mark;
    }
  }
}

struct UnpackWork {
  TableView table;
  std::int64_t segment_bytes;
  std::int64_t world_size;
  const void* staging;
  void* unsharded;
};

FSDP_HOST_DEVICE inline void unpack(const UnpackWork& work, Place place) {
  const auto* staging = static_cast<const Byte*>(work.staging);
  for (std::uint32_t tile = place.warp; tile < work.table.tiles; tile += place.warps) {
    const CopyRange range = work.table.ranges[work.table.range_of_tile[tile]];
    const Source<Byte, RankMajorRuns> source{
        staging,
        staging,
        staging + work.segment_bytes * work.world_size,
        range.run,
        {range.source, work.segment_bytes, range.run, work.world_size}};
    const Target<Byte, Byte> target{static_cast<Byte*>(work.unsharded) + range.destination,
                                    range.extent, range.extent, Action::Copy, 1.0f};
    NoLook look;
    TileMover<Byte, Byte, RankMajorRuns, NoLook>(source, target, look)
        .move(static_cast<std::int64_t>(tile - range.first_tile) * kUnpackTileBytes,
              kUnpackTileBytes, place.lane);
  }
}

struct CastWork {
  TableView table;
  const void* source;
  void* destination;
  double scale;
};

// `modes(entry)` returns the entry's mode, which is an argument of the kernel.
template <typename S, typename D, typename Modes>
FSDP_HOST_DEVICE inline void cast(const CastWork& work, const Modes& modes, Place place) {
  for (std::uint32_t i = place.warp; i < work.table.tiles; i += place.warps) {
    const std::uint32_t tile = work.table.first_tile + i;
    const CopyRange range = work.table.ranges[work.table.range_of_tile[tile]];
    const CastMode mode = modes(range.entry);
    if (mode == CastMode::Skip) {
      continue;
    }
    const auto* from =
        reinterpret_cast<const S*>(static_cast<const char*>(work.source) + range.source);
    const Source<S, StridedRuns> source{from, from, from + range.numel, range.run, {0, 0}};
    const Target<D, S> target{
        reinterpret_cast<D*>(static_cast<char*>(work.destination) + range.destination),
        range.extent, range.numel, action_of<S, D>(mode == CastMode::Add, work.scale),
        static_cast<body::Wide<S, D>>(work.scale)};
    NoLook look;
    TileMover<S, D, StridedRuns, NoLook>(source, target, look)
        .move(static_cast<std::int64_t>(tile - range.first_tile) * kTileElements, kTileElements,
              place.lane);
  }
}

}  // namespace fsdp::kernels
