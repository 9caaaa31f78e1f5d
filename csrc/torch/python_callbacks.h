// Unit updates and user collectives that are Python functions. They are given as weak references:
// calling one returns a function, or None if its owner is gone.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "core/reduce/unit_update.h"
#include "core/reduce/user_collective.h"

namespace fsdp {

// The function takes the handle of the stream to run on, which is 0 on the host, and whether it is
// called to measure.
std::shared_ptr<UnitUpdate> make_python_unit_update(pybind11::object weak_function, bool measures);

// The function takes a tensor on `device` and the handle of the stream to run on; 0 on the host. A
// communication hook of ranks that share parameters also takes the packed gradients to reduce, and
// a custom collective its input.
std::shared_ptr<UserCollective> make_python_user_collective(pybind11::object weak_function,
                                                            at::Device device);

}  // namespace fsdp
