// Unit updates that are Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/reduce/unit_update.h"

namespace fsdp {

// Calling `weak_function` returns a function, or None if its owner is gone. The function takes the
// handle of the stream to run on, which is 0 on the host, and whether it is called to measure.
std::shared_ptr<UnitUpdate> make_python_unit_update(pybind11::object weak_function, bool measures);

}  // namespace fsdp
