// OutOfMemory as PyTorch's own error, which users and `tune` catch.
#pragma once

#include <c10/util/Exception.h>

#include "base/check.h"

namespace fsdp {

// For code that autograd calls, which preserves the types of PyTorch's errors only. Where Python
// calls C++, bindings/module.cpp does the same.
template <typename Call>
void with_torch_errors(const Call& call) {
  try {
    call();
  } catch (const OutOfMemory& error) {
    C10_THROW_ERROR(OutOfMemoryError, error.what());
  }
}

}  // namespace fsdp
