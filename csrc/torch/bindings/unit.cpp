#include <optional>
#include <utility>
#include <vector>

#include "torch/bindings/registrations.h"
#include "torch/flat_tensor.h"
#include "torch/noted_objects.h"
#include "torch/torch_unit.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// An optimizer's checks, and what it tells the units.
void register_steps(py::module_& m) {
  m.def("same_objects", &same_objects, py::arg("left"), py::arg("right"));
  m.def("has_items", &has_items, py::arg("dict"), py::arg("keys"), py::arg("values"));
  m.def("have_entries", &have_entries, py::arg("dicts"), py::arg("names"), py::arg("values"));
  m.def("have_attribute", &have_attribute, py::arg("objects"), py::arg("name"), py::arg("values"));
  m.def("total_length", &total_length, py::arg("dicts"));
  m.def("addresses_of", &addresses_of, py::arg("tensors"));
  m.def("parameters_of", &parameters_of, py::arg("module"), py::arg("named_modules"));
  m.def("with_gradients", &with_gradients, py::arg("params"));
  m.def("remove_gradients", &remove_gradients, py::arg("params"));
  m.def("clear_elements", &clear_elements, py::arg("tensors"), py::arg("elements"),
        py::call_guard<py::gil_scoped_release>());
  m.def("gradients_version", &gradients_version_of, py::arg("units"));
  m.def("note_optimizer_step", &note_optimizer_step);
  m.def("call_before_shards_move", &call_before_shards_move, py::arg("function"));
  m.def("count_optimizer_steps_by_thread", &count_optimizer_steps_by_thread);
}

}  // namespace

void register_unit(py::module_& m) {
  py::class_<FlatTensor>(m, "FlatTensor")
      .def(py::init<at::Tensor, const std::vector<at::Tensor>&>(), py::arg("flat"),
           py::arg("parts"))
      .def_static("part_of", &FlatTensor::part_of, py::arg("flat"), py::arg("offset"),
                  py::arg("shape"), py::arg("dtype"))
      .def_static("has_storage_of", &FlatTensor::has_storage_of, py::arg("tensor"));
  py::class_<ModuleAttribute>(m, "ModuleAttribute")
      .def(py::init<py::object, py::str, std::size_t, bool, bool>(), py::kw_only(),
           py::arg("holder"), py::arg("name"), py::arg("parameter"), py::arg("is_plain"),
           py::arg("calls_setattr"));
  py::class_<UnitParameter>(m, "UnitParameter")
      .def(py::init([](std::vector<std::int64_t> shape, at::ScalarType dtype, bool is_input,
                       bool toggles) {
             return UnitParameter{std::move(shape), dtype, is_input, toggles};
           }),
           py::arg("shape"), py::arg("dtype"), py::kw_only(), py::arg("is_input") = false,
           py::arg("toggles") = false);
  py::class_<TorchUnit, std::shared_ptr<TorchUnit>>(m, "TorchUnit")
      .def(py::init([](const UnitLayout& layout, FlatTensor shard, at::Tensor flat_gradient,
                       std::vector<UnitParameter> parameters, at::Device device,
                       std::optional<at::ScalarType> cast_inputs,
                       std::optional<at::ScalarType> cast_outputs, std::size_t module_count) {
             return std::make_shared<TorchUnit>(
                 layout, UnitTensors{std::move(shard), std::move(flat_gradient), device},
                 std::move(parameters), ForwardCasts{cast_inputs, cast_outputs}, module_count);
           }),
           py::kw_only(), py::arg("layout"), py::arg("shard"), py::arg("flat_gradient"),
           py::arg("parameters"), py::arg("device"), py::arg("cast_inputs"),
           py::arg("cast_outputs"), py::arg("module_count"))
      .def("unsharded_views", &TorchUnit::unsharded_views)
      .def("bind", &TorchUnit::bind, py::arg("objects"), py::arg("make_gradients"),
           py::arg("extensions"), py::arg("flat_parameter"), py::arg("attributes"))
      .def(
          "enclose",
          [](TorchUnit& unit, const std::shared_ptr<TorchUnit>& inner) {
            unit.forward().enclose({inner, &inner->forward()});
          },
          py::arg("inner"))
      .def("show_accumulated",
           [](TorchUnit& unit, py::object wrap) { unit.shown_gradients().enable(std::move(wrap)); })
      .def("release_gradients", [](TorchUnit& unit) { unit.gradients().release(); })
      .def("shows_gradients", &TorchUnit::shows_gradients)
      .def("flat_gradient", [](TorchUnit& unit) { return unit.gradients().flat(); })
      .def("share_flat_gradient", &TorchUnit::share_flat_gradient)
      .def("pre_forward_hook",
           [](const std::shared_ptr<TorchUnit>& unit, std::size_t index) {
             return py::cpp_function(
                 [unit, index](py::handle module, py::handle args, py::handle kwargs) {
                   return unit->forward().pre_forward(index, module, args, kwargs);
                 },
                 py::name("fsdp_pre_forward"));
           })
      .def("post_forward_hook",
           [](const std::shared_ptr<TorchUnit>& unit, std::size_t index) {
             return py::cpp_function(
                 [unit, index](py::handle /*module*/, py::handle /*args*/, py::handle output) {
                   return unit->forward().post_forward(index, output);
                 },
                 py::name("fsdp_post_forward"));
           })
      .def("begin_skip", [](TorchUnit& unit,
                            const at::Tensor& tensor) { return unit.forward().begin_skip(tensor); })
      .def("end_skip", [](TorchUnit& unit, std::size_t index,
                          const at::Tensor& tensor) { unit.forward().end_skip(index, tensor); })
      .def_property_readonly("layout", [](TorchUnit& unit) -> const UnitLayout& {
        return unit.parameters().layout();
      });
  register_steps(m);
  m.def("note_exit", &note_exit);
  m.def("any_unit_shows_gradients", &any_unit_shows_gradients);
  m.def("note_module_change", &note_module_change);
}

}  // namespace fsdp
