// An optimizer's step checks with these functions that its parameters, their memory and its states
// are those that it noted in the step before. They compare pointers. They read an object only where
// they have to, because reading all objects of a step would miss the caches. They need the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>

namespace fsdp {

// Lists of different lengths are unequal in all functions here.
bool same_objects(const pybind11::list& left, const pybind11::list& right);
// Whether the dict has exactly these items, in this order.
bool has_items(const pybind11::dict& dict, const pybind11::list& keys,
               const pybind11::list& values);
std::size_t total_length(const pybind11::list& dicts);
// Whether each dict has its value under its name.
bool have_entries(const pybind11::list& dicts, const pybind11::list& names,
                  const pybind11::list& values);
// Whether the attribute `name` of each object is its value.
bool have_attribute(const pybind11::list& objects, const pybind11::str& name,
                    const pybind11::list& values);

// The address of each tensor's memory, to be compared with an earlier result.
pybind11::bytes addresses_of(const pybind11::list& tensors);

// Returns module.parameters(), or None if a module overrides the walk, so that Python has to list
// them. `named_modules` is nn.Module.named_modules. A walk in Python would take longer than the
// clipping of small models.
pybind11::object parameters_of(const pybind11::object& module,
                               const pybind11::object& named_modules);

// The parameters that have a gradient.
pybind11::list with_gradients(const pybind11::list& params);
void remove_gradients(const pybind11::list& params);

}  // namespace fsdp
