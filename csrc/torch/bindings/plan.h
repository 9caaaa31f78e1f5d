// The memory plan by itself in Python: what fsdp_ext.plan shows before training.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp {

void register_plan(pybind11::module_& m);

}  // namespace fsdp
