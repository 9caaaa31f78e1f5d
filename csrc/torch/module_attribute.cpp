#include "torch/module_attribute.h"

#include <utility>

#include "torch/with_python.h"

namespace py = pybind11;

namespace fsdp {
namespace {

thread_local bool is_setting = false;

struct Setting {
  Setting() { is_setting = true; }
  ~Setting() { is_setting = false; }
};

}  // namespace

ModuleAttribute::ModuleAttribute(py::object holder, py::str name, std::size_t parameter,
                                 bool is_plain, bool calls_setattr)
    : holder_(std::move(holder)),
      name_(std::move(name)),
      parameter_(parameter),
      is_plain_(is_plain),
      calls_setattr_(calls_setattr) {}

// None if the module was deleted.
py::object ModuleAttribute::dict() const {
  if (!is_plain_ && !calls_setattr_) {
    return holder_;
  }
  const py::object module = holder_();
  return module.is_none() ? module : module.attr(is_plain_ ? "__dict__" : "_parameters");
}

bool ModuleAttribute::swap(PyObject* from, PyObject* to) const {
  const py::object values = dict();
  if (values.is_none()) {
    return true;
  }
  if (PyDict_GetItemWithError(values.ptr(), name_.ptr()) != from) {
    return false;
  }
  if (calls_setattr_) {
    set_by_module(to);
  } else if (PyDict_SetItem(values.ptr(), name_.ptr(), to) != 0) {
    throw py::error_already_set();
  }
  return true;
}

bool ModuleAttribute::is(PyObject* value) const {
  const py::object values = dict();
  return !values.is_none() && PyDict_GetItemWithError(values.ptr(), name_.ptr()) == value;
}

void ModuleAttribute::put(PyObject* value) const {
  const py::object values = dict();
  if (!values.is_none() && PyDict_SetItem(values.ptr(), name_.ptr(), value) != 0) {
    throw py::error_already_set();
  }
}

void ModuleAttribute::set_by_module(PyObject* value) const {
  with_python([&] {
    const py::object module = holder_();
    {
      const Setting setting;
      py::setattr(module, name_, value);
    }
    if (!is_plain_) {
      return;
    }
    // nn.Module.__setattr__ has registered a parameter. Optimizers must see only the flat
    // parameter.
    const py::object parameters = module.attr("_parameters");
    if (PyDict_Contains(parameters.ptr(), name_.ptr()) == 1) {
      PyDict_DelItem(parameters.ptr(), name_.ptr());
      put(value);
    }
  });
}

bool ModuleAttribute::is_being_set() { return is_setting; }

}  // namespace fsdp
