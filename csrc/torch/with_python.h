#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace fsdp {

// Calls `call`, which runs Python, on a thread that may be autograd's.
template <typename Call>
void with_python(Call call) {
  const pybind11::gil_scoped_acquire gil;
  try {
    call();
  } catch (pybind11::error_already_set& error) {
    // Autograd keeps the type of errors of this class only.
    error.restore();
    python_error kept;
    kept.persist();
    throw std::move(kept);
  }
}

}  // namespace fsdp
