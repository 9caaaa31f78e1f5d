// Whether nobody has replaced a parameter, its memory or a state that an optimizer's step has
// noted. The functions compare pointers. They read an object only where they have to, because
// reading all objects of a step would miss the caches. They need the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <vector>

namespace fsdp {

// Lists of different lengths are unequal in all functions here.
bool same_objects(const pybind11::list& left, const pybind11::list& right);
// Whether the dict has these items and no others, in this order.
bool has_items(const pybind11::dict& dict, const pybind11::list& keys,
               const pybind11::list& values);
std::size_t total_length(const pybind11::list& dicts);
// Whether each dict has its value under its name.
bool have_entries(const pybind11::list& dicts, const pybind11::list& names,
                  const pybind11::list& values);
// Whether the attribute `name` of each object is its value.
bool have_attribute(const pybind11::list& objects, const pybind11::str& name,
                    const pybind11::list& values);

// Addresses of tensors' memory. It keeps no tensor alive.
class Addresses {
 public:
  explicit Addresses(const pybind11::list& tensors);
  bool are_of(const pybind11::list& tensors) const;

 private:
  std::vector<const void*> noted_;
};

}  // namespace fsdp
