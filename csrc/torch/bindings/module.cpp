#include <torch/csrc/Exceptions.h>

#include <exception>

#include "torch/bindings/registrations.h"
#include "torch/out_of_memory.h"

namespace {

void translate_out_of_memory(std::exception_ptr error) {
  try {
    fsdp::with_torch_errors([&] { std::rethrow_exception(error); });
  } catch (const c10::OutOfMemoryError&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  pybind11::register_local_exception_translator(&translate_out_of_memory);
  fsdp::register_layout(m);
  fsdp::register_unit(m);
  fsdp::register_lanes(m);
  fsdp::register_root(m);
  fsdp::register_testing(m);
}
