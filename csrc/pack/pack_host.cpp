#include <cstring>
#include <memory>
#include <type_traits>

#include "core/check.h"
#include "device/host_stream.h"
#include "pack/pack.h"
#include "pack/pack_body.h"

namespace fsdp {
namespace {

using body::BFloat16;
using body::Float16;

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

// Calls `function` with a null pointer of the element type, which is not Bytes.
template <typename Function>
void with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::Float32:
      return function(static_cast<float*>(nullptr));
    case DType::BFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case DType::Float16:
      return function(static_cast<Float16*>(nullptr));
    case DType::Float64:
      return function(static_cast<double*>(nullptr));
    case DType::Bytes:
      FSDP_CHECK(false, "bytes are moved, never cast, scaled or added");
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
  with_type(source_dtype, [&](auto* from) {
    with_type(destination_dtype, [&](auto* to) {
      using Source = std::remove_pointer_t<decltype(from)>;
      using Destination = std::remove_pointer_t<decltype(to)>;
      const auto* in = static_cast<const Source*>(source);
      auto* out = static_cast<Destination*>(destination);
      if (accumulate) {
        accumulate_run(in, out, numel, scale);
      } else {
        convert_run(in, out, numel, scale);
      }
    });
  });
}

char* at_element(void* base, std::int64_t index, DType dtype) {
  return static_cast<char*>(base) + static_cast<std::size_t>(index) * itemsize(dtype);
}

const char* at_element(const void* base, std::int64_t index, DType dtype) {
  return static_cast<const char*>(base) + static_cast<std::size_t>(index) * itemsize(dtype);
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
      move_run(at_element(gradients[i], entry.chunk_numel * rank, gradient_dtype), gradient_dtype,
               at_element(segment, entry.offset, reduce_dtype), reduce_dtype, numel, scale,
               accumulate);
      written = entry.offset + numel;
    }
    zero_until(plan.segment_numel);
  }
}

void unpack_now(const UnpackPlan& plan, const void* staging, void* unsharded) {
  for (const UnpackEntry& entry : plan.entries) {
    if (entry.chunk_bytes == 0) {
      continue;
    }
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      std::memcpy(static_cast<char*>(unsharded) + entry.destination_offset + r * entry.chunk_bytes,
                  static_cast<const char*>(staging) + r * plan.segment_bytes + entry.source_offset,
                  entry.chunk_bytes);
    }
  }
}

void cast_now(const CastPlan& plan, const void* source, void* destination, double scale) {
  for (const CastEntry& entry : plan) {
    move_run(static_cast<const char*>(source) + entry.source_offset, entry.source_dtype,
             static_cast<char*>(destination) + entry.destination_offset, entry.destination_dtype,
             entry.numel, scale, entry.accumulate);
  }
}

// Whoever issues gets these errors, not whoever waits for the stream.
void check_pack(DType gradient_dtype, DType reduce_dtype) {
  FSDP_CHECK(gradient_dtype != DType::Bytes && reduce_dtype != DType::Bytes,
             "packing gradients expects floating dtypes but got ", name(gradient_dtype), " to ",
             name(reduce_dtype), "; bytes are moved, never cast, scaled or added");
}

void check_cast(const CastEntry& entry, double scale) {
  const bool casts_bytes =
      entry.source_dtype == DType::Bytes || entry.destination_dtype == DType::Bytes;
  const bool copies =
      entry.source_dtype == entry.destination_dtype && scale == 1.0 && !entry.accumulate;
  FSDP_CHECK(copies || !casts_bytes, "a cast expects floating dtypes, or a plain copy, but got ",
             name(entry.source_dtype), " to ", name(entry.destination_dtype), " with scale ", scale,
             entry.accumulate ? ", accumulated" : "",
             "; bytes are moved, never cast, scaled or added");
}

class HostPacker final : public Packer {
 public:
  void pack(Stream& stream, const PackPlan& plan, const void* const* gradients,
            DType gradient_dtype, void* reduce_input, DType reduce_dtype, double scale,
            bool accumulate) override {
    check_pack(gradient_dtype, reduce_dtype);
    static_cast<HostQueue&>(stream).enqueue([=, &plan] {
      pack_now(plan, gradients, gradient_dtype, reduce_input, reduce_dtype, scale, accumulate);
    });
  }

  void unpack(Stream& stream, const UnpackPlan& plan, const void* staging,
              void* unsharded) override {
    static_cast<HostQueue&>(stream).enqueue([=, &plan] { unpack_now(plan, staging, unsharded); });
  }

  void cast(Stream& stream, const CastPlan& plan, const void* source, void* destination,
            double scale) override {
    for (const CastEntry& entry : plan) {
      check_cast(entry, scale);
    }
    static_cast<HostQueue&>(stream).enqueue(
        [=, &plan] { cast_now(plan, source, destination, scale); });
  }
};

}  // namespace

std::unique_ptr<Packer> make_host_packer() { return std::make_unique<HostPacker>(); }

}  // namespace fsdp
