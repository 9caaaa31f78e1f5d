// Unit updates that are Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/reduce/unit_update.h"

namespace fsdp {

// Calling `weak_function` returns a function of the handle of the stream to run on, or None if its
// owner is gone. The handle is 0 on the host.
std::shared_ptr<UnitUpdate> make_python_unit_update(pybind11::object weak_function);

}  // namespace fsdp
