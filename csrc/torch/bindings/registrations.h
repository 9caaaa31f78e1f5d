// The parts of the Python module. fsdp_ext/_C.pyi describes what Python sees.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp {

void register_layout(pybind11::module_& m);
void register_unit(pybind11::module_& m);
void register_lanes(pybind11::module_& m);
void register_root(pybind11::module_& m);
// Adds functions that only tests and benchmarks use, also to classes that other files register.
void register_testing(pybind11::module_& m);

}  // namespace fsdp
