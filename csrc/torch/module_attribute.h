// An attribute of a module that refers to a parameter of a unit, sharded and unsharded in turns.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>

namespace fsdp {

class ModuleAttribute {
 public:
  // If `is_plain`, module.__dict__ has it, because the unit has a flat parameter, and otherwise
  // module._parameters. `calls_setattr` says whether the module's own __setattr__ sets it. `holder`
  // is module._parameters if neither holds. Otherwise it is a weak reference to the module, because
  // the module refers to its hooks, which refer to the unit.
  ModuleAttribute(pybind11::object holder, pybind11::str name, std::size_t parameter, bool is_plain,
                  bool calls_setattr);

  std::size_t parameter() const { return parameter_; }  // its index in the unit

  // Replaces one object by another. Returns false, and changes nothing, if the module has something
  // else. A deleted module has nothing to change. Needs the GIL. Throws python_error if the
  // module's
  // __setattr__ raises.
  bool swap(PyObject* from, PyObject* to) const;
  // Sets it past the module's __setattr__. Needs the GIL.
  void put(PyObject* value) const;

  // The interpreter has ended, so its objects are left alone.
  void release();

  // Whether this thread sets one by the module's __setattr__, which registers it with the module.
  static bool is_being_set();

 private:
  pybind11::object dict() const;
  void set_by_module(PyObject* value) const;

  pybind11::object holder_;
  pybind11::str name_;
  std::size_t parameter_;
  bool is_plain_;
  bool calls_setattr_;
};

}  // namespace fsdp
