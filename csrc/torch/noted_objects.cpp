#include "torch/noted_objects.h"

#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace py = pybind11;

namespace fsdp {

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
    PyObject* value = PyDict_GetItemWithError(dicts[i].ptr(), names[i].ptr());
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
    if (objects[i].attr(name).ptr() != PyList_GET_ITEM(values.ptr(), i)) {
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
