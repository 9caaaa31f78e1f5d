// An attribute of a module that refers to a parameter of a unit, sharded and unsharded in turns.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>

#include "torch/with_python.h"

namespace fsdp {

class ModuleAttribute {
 public:
  // `is_plain`: the unit has a flat parameter, so the attribute is in module.__dict__ instead of
  // module._parameters. `calls_setattr`: the module's class overrides __setattr__, which then makes
  // each swap. `holder` is a weak reference to the module if one of the two is set, since the
  // module refers to its hooks and these to the unit. Otherwise it is module._parameters.
  ModuleAttribute(pybind11::object holder, pybind11::str name, std::size_t parameter, bool is_plain,
                  bool calls_setattr);

  std::size_t parameter() const { return parameter_; }  // its index in the unit

  // Replaces `from` by `to`. Returns false and changes nothing if the attribute is not `from`.
  // Does nothing and returns true if the module was deleted. Needs the GIL. Throws python_error if
  // the module's __setattr__ raises.
  bool swap(PyObject* from, PyObject* to) const;
  // Whether the attribute is `value`. Needs the GIL.
  bool is(PyObject* value) const;
  // Sets the attribute without calling __setattr__. Needs the GIL.
  void put(PyObject* value) const;

  // Whether this thread is inside a swap that calls __setattr__. The module then registers the
  // parameter, which is not a change by the user.
  static bool is_being_set();

 private:
  pybind11::object dict() const;
  void set_by_module(PyObject* value) const;

  HeldObject holder_;
  HeldObject name_;
  std::size_t parameter_;
  bool is_plain_;
  bool calls_setattr_;
};

}  // namespace fsdp
