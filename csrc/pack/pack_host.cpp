#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/with_dtype.h"
#include "device/host_stream.h"
#include "pack/pack.h"
#include "pack/pack_body.h"

namespace fsdp {
namespace {

template <typename Source, typename Destination>
void convert_run(const Source* __restrict source, Destination* __restrict destination,
                 std::int64_t numel, double scale) {
  const auto factor = static_cast<body::Wide<Source, Destination>>(scale);
  // vectorised: convert
  for (std::int64_t i = 0; i < numel; ++i) {
    destination[i] = body::convert<Destination>(source[i], factor);
  }
}

template <typename Source, typename Destination>
void accumulate_run(const Source* __restrict source, Destination* __restrict destination,
                    std::int64_t numel, double scale) {
  const auto factor = static_cast<body::Wide<Source, Destination>>(scale);
  // vectorised: accumulate
  for (std::int64_t i = 0; i < numel; ++i) {
    destination[i] = body::convert_and_add(destination[i], source[i], factor);
  }
}

// One contiguous run: `numel` elements from `source` to `destination`.
void move_run(const void* source, DType source_dtype, void* destination, DType destination_dtype,
              std::int64_t numel, double scale, bool accumulate) {
  if (numel == 0) {
    return;
  }
  if (source_dtype == destination_dtype && scale == 1.0 && !accumulate) {
    std::memcpy(destination, source, static_cast<std::size_t>(numel) * itemsize(source_dtype));
    return;
  }
  with_floats(source_dtype, destination_dtype, [&](auto from, auto to) {
    const auto* in = static_cast<const decltype(from)*>(source);
    auto* out = static_cast<decltype(to)*>(destination);
    if (accumulate) {
      accumulate_run(in, out, numel, scale);
    } else {
      convert_run(in, out, numel, scale);
    }
  });
}

// Moves runs of one pair of dtypes, chosen once for many small ones.
template <typename Source, typename Destination>
class RunMover {
 public:
  RunMover(double scale, bool accumulate)
      : scale_(scale),
        accumulate_(accumulate),
        copies_(std::is_same_v<Source, Destination> && scale == 1.0 && !accumulate) {}

  void operator()(const Source* source, Destination* destination, std::int64_t numel) const {
    if (copies_) {
      std::memcpy(destination, source, static_cast<std::size_t>(numel) * sizeof(Source));
    } else if (accumulate_) {
      accumulate_run(source, destination, numel, scale_);
    } else {
      convert_run(source, destination, numel, scale_);
    }
  }

 private:
  double scale_;
  bool accumulate_;
  bool copies_;
};

// See Note [parts of chunks].
std::int64_t stride_of(const PackEntry& entry) {
  return entry.stride != 0 ? entry.stride : entry.chunk_numel;
}

// A gradient's `numel` elements of one rank.
template <typename Source, typename Destination>
void pack_chunk(const PackEntry& entry, int world_size, int rank, const Source* gradient,
                Destination* destination, std::int64_t numel,
                const RunMover<Source, Destination>& move) {
  if (entry.runs == 1) {
    move(gradient + rank * stride_of(entry), destination, numel);
    return;
  }
  const std::int64_t run = entry.chunk_numel / entry.runs;  // Note [runs]
  for (std::int64_t k = 0; k < entry.runs; ++k) {
    move(gradient + (k * world_size + rank) * run, destination + k * run, run);
  }
}

template <typename Source, typename Destination>
void pack_as(const PackPlan& plan, const void* const* gradients, Destination* reduce_input,
             double scale, bool accumulate) {
  const RunMover<Source, Destination> move(scale, accumulate);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    Destination* segment = reduce_input + plan.segment_numel * rank;
    std::int64_t written = 0;  // of the segment; what is left out on the way is padding
    const auto zero_until = [&](std::int64_t end) {
      if (!accumulate && end > written) {
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
      pack_chunk(entry, plan.world_size, rank, static_cast<const Source*>(gradients[i]),
                 segment + entry.offset, numel, move);
      written = entry.offset + numel;
    }
    zero_until(plan.segment_numel);
  }
}

void pack_now(const PackPlan& plan, const void* const* gradients, DType gradient_dtype,
              void* reduce_input, DType reduce_dtype, double scale, bool accumulate) {
  with_floats(gradient_dtype, reduce_dtype, [&](auto from, auto to) {
    pack_as<decltype(from)>(plan, gradients, static_cast<decltype(to)*>(reduce_input), scale,
                            accumulate);
  });
}

void unpack_now(const UnpackPlan& plan, const void* staging, void* unsharded) {
  const auto world_size = static_cast<std::size_t>(plan.world_size);
  for (const UnpackEntry& entry : plan.entries) {
    const auto runs = static_cast<std::size_t>(entry.runs);
    const std::size_t run_bytes = entry.chunk_bytes / runs;  // Note [runs]
    const std::size_t stride = entry.stride != 0 ? entry.stride : run_bytes;
    for (std::size_t r = 0; run_bytes > 0 && r < world_size; ++r) {
      for (std::size_t k = 0; k < runs; ++k) {
        std::memcpy(static_cast<char*>(unsharded) + entry.destination_offset +
                        k * world_size * run_bytes + r * stride,
                    static_cast<const char*>(staging) + r * plan.segment_bytes +
                        entry.source_offset + k * run_bytes,
                    run_bytes);
      }
    }
  }
}

void cast_now(const CastPlan& plan, const CastMode* modes, const void* source, void* destination,
              double scale) {
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const CastEntry& entry = plan.entries[i];
    const CastMode mode = modes != nullptr ? modes[i] : CastMode::Write;
    if (mode == CastMode::Skip) {
      continue;
    }
    move_run(static_cast<const char*>(source) + entry.source_offset, entry.source_dtype,
             static_cast<char*>(destination) + entry.destination_offset, entry.destination_dtype,
             entry.numel, scale, mode == CastMode::Add);
  }
}

// Plans are used as they are.
class HostPacker final : public Packer {
 public:
  void prepare(PackPlan& /*plan*/) override {}
  void prepare(UnpackPlan& /*plan*/) override {}
  void prepare(CastPlan& /*plan*/) override {}

  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate) override {
    check_pack(gradient_dtype, reduce_dtype);
    const std::vector<const void*> addresses(gradients, gradients + plan.entries.size());
    static_cast<HostQueue&>(stream).enqueue([=, &plan] {
      pack_now(plan, addresses.data(), gradient_dtype, reduce_input, reduce_dtype, scale,
               accumulate);
    });
  }

  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    static_cast<HostQueue&>(stream).enqueue([=, &plan] { unpack_now(plan, staging, unsharded); });
  }

  void cast(Stream& stream, const CastPlan& plan, const CastMode* modes, const void* source,
            void* destination, double scale) override {
    for (std::size_t i = 0; i < plan.entries.size(); ++i) {
      check_cast(plan.entries[i], modes != nullptr ? modes[i] : CastMode::Write, scale);
    }
    std::vector<CastMode> kept(modes, modes != nullptr ? modes + plan.entries.size() : nullptr);
    static_cast<HostQueue&>(stream).enqueue([=, &plan, kept = std::move(kept)] {
      cast_now(plan, kept.empty() ? nullptr : kept.data(), source, destination, scale);
    });
  }
};

}  // namespace

std::unique_ptr<Packer> make_host_packer() { return std::make_unique<HostPacker>(); }

}  // namespace fsdp
