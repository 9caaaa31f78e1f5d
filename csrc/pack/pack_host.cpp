#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "device/host_stream.h"
#include "pack/pack.h"
#include "pack/pack_body.h"
#include "pack/pack_dtypes.h"

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

char* at_element(void* base, std::int64_t index, DType dtype) {
  return static_cast<char*>(base) + static_cast<std::size_t>(index) * itemsize(dtype);
}

const char* at_element(const void* base, std::int64_t index, DType dtype) {
  return static_cast<const char*>(base) + static_cast<std::size_t>(index) * itemsize(dtype);
}

// A gradient's elements of one rank, from `first` of its chunk's elements on.
void pack_chunk(const PackEntry& entry, int world_size, int rank, const void* gradient,
                DType gradient_dtype, void* destination, DType reduce_dtype, std::int64_t numel,
                double scale, bool accumulate) {
  const std::int64_t run = entry.chunk_numel / entry.runs;  // Note [runs]
  for (std::int64_t k = 0; k < entry.runs; ++k) {
    move_run(at_element(gradient, (k * world_size + rank) * run, gradient_dtype), gradient_dtype,
             at_element(destination, k * run, reduce_dtype), reduce_dtype,
             entry.runs == 1 ? numel : run, scale, accumulate);
  }
}

void pack_now(const PackPlan& plan, const void* const* gradients, DType gradient_dtype,
              void* reduce_input, DType reduce_dtype, double scale, bool accumulate) {
  for (int rank = 0; rank < plan.world_size; ++rank) {
    void* segment = at_element(reduce_input, plan.segment_numel * rank, reduce_dtype);
    std::int64_t written = 0;  // of the segment; what is left out on the way is padding
    const auto zero_until = [&](std::int64_t end) {
      if (!accumulate && end > written) {
        std::memset(at_element(segment, written, reduce_dtype), 0,
                    static_cast<std::size_t>(end - written) * itemsize(reduce_dtype));
      }
      written = end;
    };
    for (std::size_t i = 0; i < plan.entries.size(); ++i) {
      const PackEntry& entry = plan.entries[i];
      const std::int64_t numel = body::elements_of_rank(entry.numel, entry.chunk_numel, rank);
      if (gradients[i] == nullptr || numel == 0) {
        continue;
      }
      zero_until(entry.offset);
      pack_chunk(entry, plan.world_size, rank, gradients[i], gradient_dtype,
                 at_element(segment, entry.offset, reduce_dtype), reduce_dtype, numel, scale,
                 accumulate);
      written = entry.offset + numel;
    }
    zero_until(plan.segment_numel);
  }
}

void unpack_now(const UnpackPlan& plan, const void* staging, void* unsharded) {
  const auto world_size = static_cast<std::size_t>(plan.world_size);
  for (const UnpackEntry& entry : plan.entries) {
    const auto runs = static_cast<std::size_t>(entry.runs);
    const std::size_t run_bytes = entry.chunk_bytes / runs;  // Note [runs]
    for (std::size_t r = 0; run_bytes > 0 && r < world_size; ++r) {
      for (std::size_t k = 0; k < runs; ++k) {
        std::memcpy(static_cast<char*>(unsharded) + entry.destination_offset +
                        (k * world_size + r) * run_bytes,
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
