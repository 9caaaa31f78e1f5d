#include "torch/containers.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace fsdp {
namespace {

bool is_leaf(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
}

py::object map_tuple(py::handle object, const TensorMap& map) {
  const Py_ssize_t size = PyTuple_GET_SIZE(object.ptr());
  py::object result;  // made when the first element changes
  for (Py_ssize_t i = 0; i < size; ++i) {
    const py::handle item = PyTuple_GET_ITEM(object.ptr(), i);
    const py::object mapped = map_tensors(item, map);
    if (!mapped.is(item) && !result) {
      result = py::tuple(size);
      for (Py_ssize_t j = 0; j < i; ++j) {
        PyTuple_SET_ITEM(result.ptr(), j,
                         py::handle(PyTuple_GET_ITEM(object.ptr(), j)).inc_ref().ptr());
      }
    }
    if (result) {
      PyTuple_SET_ITEM(result.ptr(), i, mapped.inc_ref().ptr());
    }
  }
  return result ? result : py::reinterpret_borrow<py::object>(object);
}

py::object map_list(py::handle object, const TensorMap& map) {
  const auto list = py::reinterpret_borrow<py::list>(object);
  py::object result = list;  // replaced by a copy at the first change
  for (std::size_t i = 0; i < list.size(); ++i) {
    const py::object item = list[i];
    const py::object mapped = map_tensors(item, map);
    if (mapped.is(item)) {
      continue;
    }
    if (result.is(list)) {
      result = py::reinterpret_steal<py::object>(
          PyList_GetSlice(list.ptr(), 0, static_cast<Py_ssize_t>(list.size())));
    }
    result[py::int_(i)] = mapped;
  }
  return result;
}

py::object map_dict(py::handle object, const TensorMap& map) {
  const auto dict = py::reinterpret_borrow<py::dict>(object);
  py::object result = dict;  // replaced by a copy at the first change
  for (const auto& [key, item] : dict) {
    const py::object mapped = map_tensors(item, map);
    if (mapped.is(item)) {
      continue;
    }
    if (result.is(dict)) {
      result = py::reinterpret_steal<py::object>(PyDict_Copy(dict.ptr()));
    }
    result[key] = mapped;
  }
  return result;
}

py::object python_helper(const char* name) {
  return py::module_::import("fsdp_ext._util.containers").attr(name);
}

}  // namespace

py::object map_tensors(py::handle object, const TensorMap& map) {
  PyObject* raw = object.ptr();
  if (is_leaf(raw)) {
    return py::reinterpret_borrow<py::object>(object);
  }
  // Containers come first, because THPVariable_Check runs Python code for objects that are not
  // tensors.
  if (PyTuple_CheckExact(raw)) {
    return map_tuple(object, map);
  }
  if (PyList_CheckExact(raw)) {
    return map_list(object, map);
  }
  if (PyDict_CheckExact(raw)) {
    return map_dict(object, map);
  }
  if (THPVariable_Check(raw)) {
    const at::Tensor& tensor = THPVariable_Unpack(raw);
    at::Tensor mapped = map(tensor);
    if (mapped.is_same(tensor)) {
      return py::reinterpret_borrow<py::object>(object);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(mapped)));
  }
  return python_helper("map_tensors")(
      py::cpp_function([&map](py::handle item) { return map_tensors(item, map); }), object);
}

py::object to_device(py::handle object, at::Device device) {
  return map_tensors(object, [device](const at::Tensor& tensor) {
    return tensor.device() == device ? tensor : tensor.to(device);
  });
}

std::string opaque_type_in(py::handle object) {
  if (is_leaf(object.ptr()) || THPVariable_Check(object.ptr())) {
    return {};
  }
  return python_helper("opaque_type_in")(object).cast<std::string>();
}

}  // namespace fsdp
