#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/copy.h"
#include "base/instruction_set.h"
#include "base/with_dtype.h"
#include "device/host_stream.h"
#include "pack/pack.h"
#include "pack/pack_body.h"

namespace fsdp {
namespace {

using element::BFloat16;

// - Loops over a contiguous run, see Note [instruction sets]. tools/check_vectorised.py reads the
//   marks.
//
// Note [pairs]
// bf16 becomes bf16 by pairs of neighbours, the halves of a 32-bit word. Each half is widened and
// rounded in its place. Element by element, the compiler unpacks each vector into two vectors of
// 32-bit elements and packs those again, which took 1.7 times as long.

struct Pair {
  float lower;
  float upper;
};

FSDP_ALWAYS_INLINE Pair widen_pair(std::uint32_t word) {
  return {element::bit_cast<float>(word << 16), element::bit_cast<float>(word & 0xffff0000u)};
}

FSDP_ALWAYS_INLINE std::uint32_t round_pair(float lower, float upper) {
  return element::round_to_upper_half(lower) >> 16 |
         (element::round_to_upper_half(upper) & 0xffff0000u);
}

FSDP_ALWAYS_INLINE std::uint32_t load_word(const BFloat16* elements) {
  std::uint32_t word;
  std::memcpy(&word, elements, sizeof(word));
  return word;
}

FSDP_ALWAYS_INLINE void store_word(BFloat16* elements, std::uint32_t word) {
  std::memcpy(elements, &word, sizeof(word));
}

// NaN and Inf have all bits of the exponent set. Adding the lowest of these bits to the exponent
// then carries into the bit of the sign, and into no other element's bits.
template <typename Bits, Bits exponent, Bits lowest>
struct Exponent {
  using Type = Bits;

  static FSDP_ALWAYS_INLINE Bits look(Bits bits) {
    return static_cast<Bits>((bits & exponent) + lowest);
  }
};

template <typename Source>
struct ExponentOf;
template <>
struct ExponentOf<float> : Exponent<std::uint32_t, 0x7f800000, 0x00800000> {};
template <>
struct ExponentOf<double> : Exponent<std::uint64_t, 0x7ff0000000000000, 0x0010000000000000> {};
template <>
struct ExponentOf<element::Float16> : Exponent<std::uint16_t, 0x7c00, 0x0400> {};
template <>
struct ExponentOf<BFloat16> : Exponent<std::uint16_t, 0x7f80, 0x0080> {};
using ExponentsOfPair = Exponent<std::uint32_t, 0x7f807f80, 0x00800080>;

template <typename Source>
using Seen = typename ExponentOf<Source>::Type;

template <typename Source>
FSDP_ALWAYS_INLINE Seen<Source> look(Source element) {
  return ExponentOf<Source>::look(element::bit_cast<Seen<Source>>(element));
}

// Merges the findings for both halves of a word.
FSDP_ALWAYS_INLINE Seen<BFloat16> either(std::uint32_t seen) {
  return static_cast<Seen<BFloat16>>(seen | seen >> 16);
}

template <typename Source>
bool has_nonfinite(Seen<Source> seen) {
  return seen >> (8 * sizeof(Source) - 1) != 0;
}

template <typename Source, typename Destination>
struct ConvertLoop {
  static FSDP_ALWAYS_INLINE void run(const Source* __restrict source,
                                     Destination* __restrict destination, std::int64_t numel,
                                     body::Wide<Source, Destination> scale,
                                     Seen<Source>* __restrict seen) {
    Seen<Source> any = 0;
    // vectorised (baseline, AVX2, AVX-512): convert 30, 16, 16
    for (std::int64_t i = 0; i < numel; ++i) {
      any |= look(source[i]);
      destination[i] = body::convert<Destination>(source[i], scale);
    }
    *seen |= any;
  }
};

// Copies bits, so that a NaN keeps its own.
template <typename Element>
struct CopyLoop {
  static FSDP_ALWAYS_INLINE void run(const Element* __restrict source,
                                     Element* __restrict destination, std::int64_t numel,
                                     body::Wide<Element, Element> /*scale*/,
                                     Seen<Element>* __restrict seen) {
    Seen<Element> any = 0;
    // vectorised (baseline, AVX2, AVX-512): copy 8, 6, 6
    for (std::int64_t i = 0; i < numel; ++i) {
      const auto bits = element::bit_cast<Seen<Element>>(source[i]);
      any |= ExponentOf<Element>::look(bits);
      destination[i] = element::bit_cast<Element>(bits);
    }
    *seen |= any;
  }
};

template <>
struct ConvertLoop<BFloat16, BFloat16> {
  static FSDP_ALWAYS_INLINE void run(const BFloat16* __restrict source,
                                     BFloat16* __restrict destination, std::int64_t numel,
                                     float scale, Seen<BFloat16>* __restrict seen) {
    std::uint32_t any = 0;
    // vectorised (baseline, AVX2, AVX-512): convert pairs 2, 2, 2
    for (std::int64_t i = 0; i < numel / 2; ++i) {
      const std::uint32_t word = load_word(source + 2 * i);
      any |= ExponentsOfPair::look(word);
      const Pair pair = widen_pair(word);
      store_word(destination + 2 * i, round_pair(pair.lower * scale, pair.upper * scale));
    }
    *seen |= either(any);
    if (numel % 2 != 0) {
      *seen |= look(source[numel - 1]);
      destination[numel - 1] = body::convert<BFloat16>(source[numel - 1], scale);
    }
  }
};

template <typename Source, typename Destination>
struct AccumulateLoop {
  static FSDP_ALWAYS_INLINE void run(const Source* __restrict source,
                                     Destination* __restrict destination, std::int64_t numel,
                                     body::Wide<Source, Destination> scale,
                                     Seen<Source>* __restrict seen) {
    Seen<Source> any = 0;
    // vectorised (baseline, AVX2, AVX-512): accumulate 15, 8, 8
    for (std::int64_t i = 0; i < numel; ++i) {
      any |= look(source[i]);
      destination[i] = body::convert_and_add(destination[i], source[i], scale);
    }
    *seen |= any;
  }
};

template <>
struct AccumulateLoop<BFloat16, BFloat16> {
  static FSDP_ALWAYS_INLINE void run(const BFloat16* __restrict source,
                                     BFloat16* __restrict destination, std::int64_t numel,
                                     float scale, Seen<BFloat16>* __restrict seen) {
    std::uint32_t any = 0;
    // vectorised (baseline, AVX2, AVX-512): accumulate pairs 1, 1, 1
    for (std::int64_t i = 0; i < numel / 2; ++i) {
      const std::uint32_t word = load_word(source + 2 * i);
      any |= ExponentsOfPair::look(word);
      const Pair pair = widen_pair(word);
      const Pair rounded = widen_pair(round_pair(pair.lower * scale, pair.upper * scale));
      const Pair before = widen_pair(load_word(destination + 2 * i));
      store_word(destination + 2 * i,
                 round_pair(before.lower + rounded.lower, before.upper + rounded.upper));
    }
    *seen |= either(any);
    if (numel % 2 != 0) {
      *seen |= look(source[numel - 1]);
      BFloat16& last = destination[numel - 1];
      last = body::convert_and_add(last, source[numel - 1], scale);
    }
  }
};

// Runs `Loop` with non-temporal stores, for whole blocks of a destination that begins a cache
// line. A block is a few cache lines: with more, the processor no longer overlaps the arithmetic of
// one block with the stores of another.
constexpr std::int64_t kBlock = 64;

// The source is prefetched this many bytes ahead. The processor's own prefetching is not enough: it
// left a cast from fp32 to bf16 at three quarters of this speed.
constexpr std::int64_t kPrefetchAhead = 4096;

template <typename Loop, typename Source, typename Destination>
struct PastCachesLoop {
  static FSDP_ALWAYS_INLINE void run(const Source* __restrict source,
                                     Destination* __restrict destination, std::int64_t numel,
                                     body::Wide<Source, Destination> scale,
                                     Seen<Source>* __restrict seen) {
    constexpr std::int64_t kAhead = kPrefetchAhead / sizeof(Source);
    alignas(kCacheLine) Destination block[kBlock];
    Seen<Source> any = 0;
    for (std::int64_t done = 0; done < numel; done += kBlock) {
      if (done + kAhead < numel) {
        prefetch_cache_lines(source + done + kAhead, kBlock * sizeof(Source));
      }
      Loop::run(source + done, block, kBlock, scale, &any);
      stream_cache_lines(destination + done, block, sizeof(block));
    }
    finish_streaming();
    *seen |= any;
  }
};

// - Runs

// How the runs of one output are moved.
struct RunSettings {
  double scale;
  bool accumulate;
  InstructionSet instruction_set;
  std::size_t smallest_past_caches;  // bytes of a run
};

// fp64 has the baseline alone: nobody trains in it, and each instance takes time to compile.
template <typename Loop, typename Source, typename Destination, typename Scale>
void run_best_loop(InstructionSet set, const Source* source, Destination* destination,
                   std::int64_t numel, Scale scale, Seen<Source>* seen) {
  if constexpr (std::is_same_v<Scale, double>) {
    run_baseline<Loop>(source, destination, numel, scale, seen);
  } else {
    run_loop<Loop>(set, source, destination, numel, scale, seen);
  }
}

// Runs a loop that does not read its destination. Writes past the caches if the run is large.
template <typename Loop, typename Source, typename Destination, typename Scale>
void write_run(const Source* source, Destination* destination, std::int64_t numel, Scale scale,
               const RunSettings& settings, Seen<Source>* seen) {
  const InstructionSet set = settings.instruction_set;
  if (static_cast<std::size_t>(numel) * sizeof(Destination) < settings.smallest_past_caches) {
    run_best_loop<Loop>(set, source, destination, numel, scale, seen);
    return;
  }
  const std::size_t to_line = bytes_to_cache_line(destination) / sizeof(Destination);
  const std::int64_t head = std::min(static_cast<std::int64_t>(to_line), numel);
  const std::int64_t tail = head + (numel - head) / kBlock * kBlock;
  run_best_loop<Loop>(set, source, destination, head, scale, seen);
  run_best_loop<PastCachesLoop<Loop, Source, Destination>>(set, source + head, destination + head,
                                                           tail - head, scale, seen);
  run_best_loop<Loop>(set, source + tail, destination + tail, numel - tail, scale, seen);
}

// Returns whether the run has NaN or Inf.
template <typename Source, typename Destination>
bool move_run(const Source* source, Destination* destination, std::int64_t numel,
              const RunSettings& settings) {
  const auto scale = static_cast<body::Wide<Source, Destination>>(settings.scale);
  Seen<Source> seen = 0;
  if (settings.accumulate) {
    run_best_loop<AccumulateLoop<Source, Destination>>(settings.instruction_set, source,
                                                       destination, numel, scale, &seen);
    return has_nonfinite<Source>(seen);
  }
  if constexpr (std::is_same_v<Source, Destination>) {
    if (settings.scale == 1.0) {
      write_run<CopyLoop<Source>>(source, destination, numel, scale, settings, &seen);
      return has_nonfinite<Source>(seen);
    }
  }
  write_run<ConvertLoop<Source, Destination>>(source, destination, numel, scale, settings, &seen);
  return has_nonfinite<Source>(seen);
}

// See Note [parts of chunks].
std::int64_t stride_of(const PackEntry& entry) {
  return entry.stride != 0 ? entry.stride : entry.chunk_numel;
}

// Moves the elements of one gradient that belong to one rank, and returns whether NaN or Inf is
// among them.
template <typename Source, typename Destination>
bool pack_chunk(const PackEntry& entry, int world_size, int rank, const Source* gradient,
                Destination* destination, const RunSettings& settings) {
  if (entry.runs == 1) {
    const std::int64_t stride = stride_of(entry);
    return move_run(gradient + rank * stride, destination,
                    body::elements_of_rank(entry.numel, entry.chunk_numel, stride, rank), settings);
  }
  const std::int64_t run = entry.chunk_numel / entry.runs;  // Note [runs]
  bool found = false;
  for (std::int64_t k = 0; k < entry.runs; ++k) {
    found |=
        move_run(gradient + (k * world_size + rank) * run, destination + k * run, run, settings);
  }
  return found;
}

template <typename Source, typename Destination>
void pack_as(const PackPlan& plan, const void* const* gradients, Destination* reduce_input,
             const RunSettings& settings, const NonfiniteMarks& marks) {
  for (int rank = 0; rank < plan.world_size; ++rank) {
    Destination* segment = reduce_input + plan.segment_numel * rank;
    std::int64_t written = 0;  // elements of the segment; those that are skipped are padding
    const auto zero_until = [&](std::int64_t end) {
      if (!settings.accumulate && end > written) {
        std::memset(static_cast<void*>(segment + written), 0,
                    static_cast<std::size_t>(end - written) * sizeof(Destination));
      }
    };
    for (std::size_t i = 0; i < plan.entries.size(); ++i) {
      const PackEntry& entry = plan.entries[i];
      const std::int64_t numel =
          body::elements_of_rank(entry.numel, entry.chunk_numel, stride_of(entry), rank);
      if (gradients[i] == nullptr || numel == 0) {
        continue;
      }
      zero_until(entry.offset);
      const bool found =
          pack_chunk(entry, plan.world_size, rank, static_cast<const Source*>(gradients[i]),
                     segment + entry.offset, settings);
      if (found && marks.of_entries != nullptr) {
        marks.of_entries[i] = marks.mark;
      }
      written = entry.offset + numel;
    }
    zero_until(plan.segment_numel);
  }
}

void unpack_now(const UnpackPlan& plan, const void* staging, void* unsharded,
                const RunSettings& settings) {
  const auto world_size = static_cast<std::size_t>(plan.world_size);
  for (const UnpackEntry& entry : plan.entries) {
    const auto runs = static_cast<std::size_t>(entry.runs);
    const std::size_t run_bytes = entry.chunk_bytes / runs;  // Note [runs]
    const std::size_t stride = entry.stride != 0 ? entry.stride : run_bytes;
    for (std::size_t r = 0; run_bytes > 0 && r < world_size; ++r) {
      for (std::size_t k = 0; k < runs; ++k) {
        copy(static_cast<char*>(unsharded) + entry.destination_offset + k * world_size * run_bytes +
                 r * stride,
             static_cast<const char*>(staging) + r * plan.segment_bytes + entry.source_offset +
                 k * run_bytes,
             run_bytes, run_bytes >= settings.smallest_past_caches);
      }
    }
  }
}

void cast_entry(const CastEntry& entry, const void* source, void* destination,
                const RunSettings& settings) {
  const void* from = static_cast<const char*>(source) + entry.source_offset;
  void* to = static_cast<char*>(destination) + entry.destination_offset;
  if (entry.numel == 0) {
    return;
  }
  if (entry.source_dtype == DType::Bytes) {  // which are only copied, see check_cast
    const auto bytes = static_cast<std::size_t>(entry.numel);
    copy(to, from, bytes, bytes >= settings.smallest_past_caches);
    return;
  }
  with_floats(entry.source_dtype, entry.destination_dtype, [&](auto in, auto out) {
    move_run(static_cast<const decltype(in)*>(from), static_cast<decltype(out)*>(to), entry.numel,
             settings);
  });
}

// Plans need no preparation.
class HostPacker final : public Packer {
 public:
  explicit HostPacker(const HostPackerSettings& settings) : settings_(settings) {
    FSDP_CHECK(is_supported(settings.instruction_set), "the host packer got ",
               name(settings.instruction_set),
               ", which this processor or build does not have. Pass best_instruction_set().");
  }

  void prepare(PackPlan& /*plan*/) override {}
  void prepare(UnpackPlan& /*plan*/) override {}
  void prepare(CastPlan& /*plan*/) override {}

  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate, const NonfiniteMarks& marks) override {
    check_pack(gradient_dtype, reduce_dtype);
    const std::vector<const void*> addresses(gradients, gradients + plan.entries.size());
    const std::size_t bytes = static_cast<std::size_t>(plan.segment_numel) *
                              static_cast<std::size_t>(plan.world_size) * itemsize(reduce_dtype);
    const RunSettings settings = run_settings(scale, accumulate, bytes);
    static_cast<HostQueue&>(stream).enqueue([=, &plan] {
      with_floats(gradient_dtype, reduce_dtype, [&](auto from, auto to) {
        pack_as<decltype(from)>(plan, addresses.data(), static_cast<decltype(to)*>(reduce_input),
                                settings, marks);
      });
    });
  }

  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    const std::size_t bytes = plan.segment_bytes * static_cast<std::size_t>(plan.world_size);
    const RunSettings settings = run_settings(1.0, false, bytes);
    static_cast<HostQueue&>(stream).enqueue(
        [=, &plan] { unpack_now(plan, staging, unsharded, settings); });
  }

  void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
            void* destination, double scale) override {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < plan.entries.size(); ++i) {
      const CastEntry& entry = plan.entries[i];
      check_cast(entry, modes != nullptr ? modes[i] : CastMode::Write, scale);
      bytes += static_cast<std::size_t>(entry.numel) * itemsize(entry.destination_dtype);
    }
    std::vector<CastMode> kept(modes, modes != nullptr ? modes + plan.entries.size() : nullptr);
    RunSettings settings = run_settings(scale, false, bytes);
    static_cast<HostQueue&>(stream).enqueue([=, &plan, kept = std::move(kept)]() mutable {
      for (std::size_t i = 0; i < plan.entries.size(); ++i) {
        const CastMode mode = kept.empty() ? CastMode::Write : kept[i];
        settings.accumulate = mode == CastMode::Add;
        if (mode != CastMode::Skip) {
          cast_entry(plan.entries[i], source, destination, settings);
        }
      }
    });
  }

 private:
  // Settings for an output of `bytes`. A small output stays in the caches for the next operation.
  RunSettings run_settings(double scale, bool accumulate, std::size_t bytes) const {
    return {scale, accumulate, settings_.instruction_set,
            bytes >= settings_.large_output ? settings_.large_run
                                            : std::numeric_limits<std::size_t>::max()};
  }

  HostPackerSettings settings_;
};

}  // namespace

std::unique_ptr<Packer> make_host_packer(const HostPackerSettings& settings) {
  return std::make_unique<HostPacker>(settings);
}

}  // namespace fsdp
