// Tensors inside the arguments and results of a module's forward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>

namespace fsdp {

// Returns the tensor itself where it is to stay.
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// Applies `map` to every tensor in `object`: tensors, and tuples, lists and dicts of them, are
// walked here; any other container (dataclasses, named tuples, subclasses) in
// fsdp_ext._util.containers. Returns `object` itself where nothing changed. Needs the GIL.
pybind11::object map_tensors(pybind11::handle object, const TensorMap& map);

}  // namespace fsdp
