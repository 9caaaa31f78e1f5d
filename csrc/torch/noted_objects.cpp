#include "torch/noted_objects.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace py = pybind11;

namespace fsdp {
namespace {

// Lists parameters in the order of nn.Module.named_parameters, each once.
class ParameterWalk {
 public:
  explicit ParameterWalk(const py::object& named_modules) : named_modules_(named_modules) {}

  // Returns false if a module inside overrides named_modules, or does not keep its modules
  // and its parameters in plain dicts, as scripted modules do.
  bool visit(py::handle module) {
    if (!modules_.insert(module.ptr()).second) {
      return true;
    }
    const auto attributes =
        py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(module.ptr(), nullptr));
    if (!attributes) {
      throw py::error_already_set();
    }
    PyObject* const parameters = entry(attributes, parameters_name_);
    PyObject* const children = entry(attributes, modules_name_);
    if (!is_plain(parameters) || !is_plain(children) || has_own_walk(module, attributes)) {
      return false;
    }
    add(parameters);
    return visit_all(children);
  }

  py::list found() const { return found_; }

 private:
  // Python's own names are interned, too, so that comparing them reads no text.
  static py::object interned(const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  }

  static PyObject* entry(const py::dict& dict, const py::object& name) {
    return PyDict_GetItemWithError(dict.ptr(), name.ptr());
  }

  static bool is_plain(PyObject* dict) { return dict != nullptr && PyDict_CheckExact(dict) != 0; }

  bool has_own_walk(py::handle module, const py::dict& attributes) {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(module.ptr())));
    if (types_.insert(type.ptr()).second && !py::object(type.attr(walk_name_)).is(named_modules_)) {
      return true;
    }
    return entry(attributes, walk_name_) != nullptr;
  }

  void add(PyObject* parameters) {
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(parameters, &position, nullptr, &value) != 0) {
      if (value != Py_None && parameters_.insert(value).second) {
        found_.append(py::handle(value));
      }
    }
  }

  bool visit_all(PyObject* children) {
    Py_ssize_t position = 0;
    PyObject* child = nullptr;
    while (PyDict_Next(children, &position, nullptr, &child) != 0) {
      if (child != Py_None && !visit(child)) {
        return false;
      }
    }
    return true;
  }

  const py::object& named_modules_;
  const py::object parameters_name_ = interned("_parameters");
  const py::object modules_name_ = interned("_modules");
  const py::object walk_name_ = interned("named_modules");
  ska::flat_hash_set<PyObject*> modules_;
  ska::flat_hash_set<PyObject*> parameters_;
  ska::flat_hash_set<PyObject*> types_;
  py::list found_;
};

}  // namespace

py::object parameters_of(const py::object& module, const py::object& named_modules) {
  ParameterWalk walk(named_modules);
  return walk.visit(module) ? py::object(walk.found()) : py::none();
}

bool same_objects(const py::list& left, const py::list& right) {
  if (left.size() != right.size()) {
    return false;
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (PyList_GET_ITEM(left.ptr(), i) != PyList_GET_ITEM(right.ptr(), i)) {
      return false;
    }
  }
  return true;
}

bool has_items(const py::dict& dict, const py::list& keys, const py::list& values) {
  if (dict.size() != keys.size() || dict.size() != values.size()) {
    return false;
  }
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (std::size_t i = 0; PyDict_Next(dict.ptr(), &position, &key, &value) != 0; ++i) {
    if (key != PyList_GET_ITEM(keys.ptr(), i) || value != PyList_GET_ITEM(values.ptr(), i)) {
      return false;
    }
  }
  return true;
}

std::size_t total_length(const py::list& dicts) {
  std::size_t total = 0;
  for (const py::handle dict : dicts) {
    total += py::len(dict);
  }
  return total;
}

bool have_entries(const py::list& dicts, const py::list& names, const py::list& values) {
  if (dicts.size() != values.size() || names.size() != values.size()) {
    return false;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyObject* value =
        PyDict_GetItemWithError(PyList_GET_ITEM(dicts.ptr(), i), PyList_GET_ITEM(names.ptr(), i));
    if (value == nullptr && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    if (value != PyList_GET_ITEM(values.ptr(), i)) {
      return false;
    }
  }
  return true;
}

bool have_attribute(const py::list& objects, const py::str& name, const py::list& values) {
  if (objects.size() != values.size()) {
    return false;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = py::getattr(PyList_GET_ITEM(objects.ptr(), i), name);
    if (value.ptr() != PyList_GET_ITEM(values.ptr(), i)) {
      return false;
    }
  }
  return true;
}

py::bytes addresses_of(const py::list& tensors) {
  std::vector<const void*> addresses(tensors.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), i);
    addresses[i] = THPVariable_Unpack(tensor).const_data_ptr();
  }
  return {reinterpret_cast<const char*>(addresses.data()), addresses.size() * sizeof(void*)};
}

py::list with_gradients(const py::list& params) {
  py::list found;
  for (const py::handle param : params) {
    if (THPVariable_Unpack(param.ptr()).grad().defined()) {
      found.append(param);
    }
  }
  return found;
}

void remove_gradients(const py::list& params) {
  for (const py::handle param : params) {
    THPVariable_Unpack(param.ptr()).mutable_grad().reset();
  }
}

}  // namespace fsdp
