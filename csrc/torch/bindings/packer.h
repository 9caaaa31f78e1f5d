// The packer by itself in Python, for tests and benchmarks.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp {

void register_packer(pybind11::module_& m);

}  // namespace fsdp
