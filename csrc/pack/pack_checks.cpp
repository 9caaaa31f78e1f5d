// Checks of arguments that all packers share.
#include "base/check.h"
#include "pack/pack.h"

namespace fsdp {

void check_pack(DType gradient_dtype, DType reduce_dtype) {
  FSDP_CHECK(gradient_dtype != DType::Bytes && reduce_dtype != DType::Bytes,
             "pack got gradients of ", name(gradient_dtype), " to reduce as ", name(reduce_dtype),
             ". Pass floating dtypes; bytes cannot be scaled or added.");
}

void check_cast(const CastEntry& entry, CastMode mode, double scale) {
  const bool casts_bytes =
      entry.source_dtype == DType::Bytes || entry.destination_dtype == DType::Bytes;
  const bool copies =
      entry.source_dtype == entry.destination_dtype && scale == 1.0 && mode != CastMode::Add;
  FSDP_CHECK(copies || mode == CastMode::Skip || !casts_bytes, "cast got ",
             name(entry.source_dtype), " to ", name(entry.destination_dtype), " with scale ", scale,
             mode == CastMode::Add ? ", accumulated" : "",
             ". Pass floating dtypes, or copy bytes unchanged; they cannot be scaled or added.");
}

}  // namespace fsdp
