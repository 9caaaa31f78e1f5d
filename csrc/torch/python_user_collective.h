// User collectives that are Python functions.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "core/reduce/user_collective.h"

namespace fsdp {

// `weak_function` is a weak reference: calling it returns a function, or None if its owner is gone.
// The function takes a tensor on `device` and the handle of the stream to run on; 0 on the host. A
// communication hook of ranks that share parameters also takes the packed gradients to reduce, and
// a custom collective its input.
std::shared_ptr<UserCollective> make_python_user_collective(pybind11::object weak_function,
                                                            at::Device device);

}  // namespace fsdp
