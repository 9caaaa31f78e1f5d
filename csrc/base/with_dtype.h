// Maps a dtype known at run time to a type known at compile time.
#pragma once

#include "base/check.h"
#include "base/dtype.h"
#include "base/element.h"

namespace fsdp {

// Calls `function` with a value of the element type. Bytes have none.
template <typename Function>
void with_float(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::Float32:
      return function(float{});
    case DType::BFloat16:
      return function(element::BFloat16{});
    case DType::Float16:
      return function(element::Float16{});
    case DType::Float64:
      return function(double{});
    case DType::Bytes:
      FSDP_CHECK(false, "bytes are moved, never cast, scaled or added");
  }
}

template <typename Function>
void with_floats(DType from, DType to, const Function& function) {
  with_float(from, [&](auto source) {
    with_float(to, [&](auto destination) { function(source, destination); });
  });
}

}  // namespace fsdp
