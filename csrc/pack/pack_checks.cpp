// Checks of arguments that all packers share.
#include "base/check.h"
#include "pack/pack.h"

namespace fsdp {

void check_pack(DType gradient_dtype, DType reduce_dtype) {
  FSDP_CHECK(gradient_dtype != DType::Bytes && reduce_dtype != DType::Bytes,
             "packing gradients expects floating dtypes but got ", name(gradient_dtype), " to ",
             name(reduce_dtype), "; bytes are moved, never cast, scaled or added");
}

void check_cast(const CastEntry& entry, CastMode mode, double scale) {
  const bool casts_bytes =
      entry.source_dtype == DType::Bytes || entry.destination_dtype == DType::Bytes;
  const bool copies =
      entry.source_dtype == entry.destination_dtype && scale == 1.0 && mode != CastMode::Add;
  FSDP_CHECK(copies || mode == CastMode::Skip || !casts_bytes,
             "a cast expects floating dtypes, or a plain copy, but got ", name(entry.source_dtype),
             " to ", name(entry.destination_dtype), " with scale ", scale,
             mode == CastMode::Add ? ", accumulated" : "",
             "; bytes are moved, never cast, scaled or added");
}

}  // namespace fsdp
