// Maps the tensors inside the arguments and results of a module's forward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>

namespace fsdp {

// A function that returns a new tensor, or the same one to leave it as it is.
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// Applies `map` to every tensor in `object` and returns `object` itself if nothing changed. Tuples,
// lists and dicts are walked here, and other containers (dataclasses, named tuples, subclasses) in
// fsdp_ext/_util/containers.py. Needs the GIL.
pybind11::object map_tensors(pybind11::handle object, const TensorMap& map);

// Moves every tensor in `object` that is elsewhere to `device`.
pybind11::object to_device(pybind11::handle object, at::Device device);

// The name of the type of an object in `object` that map_tensors cannot look into, although it may
// hold tensors; empty if there is none.
std::string opaque_type_in(pybind11::handle object);

}  // namespace fsdp
