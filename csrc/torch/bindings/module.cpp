// What Python sees as fsdp_ext._C; fsdp_ext/_C.pyi describes it.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "core/layout.h"
#include "core/ledger.h"
#include "core/pipeline.h"
#include "torch/bindings/ledger.h"
#include "torch/bindings/packer.h"
#include "torch/bindings/plan.h"
#include "torch/dtype.h"
#include "torch/torch_root.h"
#include "torch/torch_unit.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// (name, shape, dtype of the shard, dtype of the unsharded parameter, trainable)
using PyParamSpec =
    std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType, at::ScalarType, bool>;

ParamSpec param_spec(const PyParamSpec& spec) {
  const auto& [name, shape, shard_dtype, param_dtype, trainable] = spec;
  ParamSpec result;
  result.name = name;
  result.rows = shape.at(0);
  result.row_numel = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) {
    result.row_numel *= shape[i];
  }
  result.shard_dtype = to_dtype(shard_dtype);
  result.param_dtype = to_dtype(param_dtype);
  if (result.shard_dtype == DType::Bytes) {  // moved, never cast: a row is so many bytes
    result.row_numel *= static_cast<std::int64_t>(c10::elementSize(shard_dtype));
  }
  result.trainable = trainable;
  return result;
}

std::vector<ParamSpec> param_specs(const std::vector<PyParamSpec>& specs) {
  std::vector<ParamSpec> params;
  params.reserve(specs.size());
  for (const PyParamSpec& spec : specs) {
    params.push_back(param_spec(spec));
  }
  return params;
}

void register_layout(py::module_& m) {
  m.def(
      "layout_order",
      [](const std::vector<PyParamSpec>& specs, int world_size, std::size_t direct_bytes) {
        return layout_order(param_specs(specs), world_size, direct_bytes);
      },
      py::arg("params"), py::arg("world_size"), py::arg("direct_bytes") = kDirectBytes);
  py::class_<ParamPlacement>(m, "ParamPlacement")
      .def_readonly("numel", &ParamPlacement::numel)
      .def_readonly("chunk_rows", &ParamPlacement::chunk_rows)
      .def_readonly("chunk_numel", &ParamPlacement::chunk_numel)
      .def_readonly("shard_offset", &ParamPlacement::shard_offset)
      .def_readonly("gather_offset", &ParamPlacement::gather_offset)
      .def_readonly("unsharded_offset", &ParamPlacement::unsharded_offset)
      .def_readonly("grad_offset", &ParamPlacement::grad_offset);
  py::class_<UnitLayout>(m, "UnitLayout")
      .def(py::init([](const std::vector<PyParamSpec>& specs, int world_size,
                       at::ScalarType grad_dtype, at::ScalarType reduce_dtype,
                       std::size_t direct_bytes) {
             return UnitLayout(param_specs(specs), world_size, to_dtype(grad_dtype),
                               to_dtype(reduce_dtype), direct_bytes);
           }),
           py::arg("params"), py::arg("world_size"), py::arg("grad_dtype"), py::arg("reduce_dtype"),
           py::arg("direct_bytes") = kDirectBytes)
      .def_property_readonly("world_size", &UnitLayout::world_size)
      .def_property_readonly("placements", &UnitLayout::placements)
      .def_property_readonly("shard_bytes", &UnitLayout::shard_bytes)
      .def_property_readonly("gather_bytes", &UnitLayout::gather_bytes)
      .def_property_readonly("unsharded_bytes", &UnitLayout::unsharded_bytes)
      .def_property_readonly("grad_numel", &UnitLayout::grad_numel)
      .def_property_readonly("needs_cast", &UnitLayout::needs_cast)
      .def("first_row", &UnitLayout::first_row)
      .def("row_count", &UnitLayout::row_count);
}

void register_unit(py::module_& m) {
  py::class_<TorchUnit, std::shared_ptr<TorchUnit>>(m, "TorchUnit")
      .def(py::init([](const UnitLayout& layout, at::Tensor flat_shard, at::Tensor flat_gradient,
                       std::vector<std::vector<std::int64_t>> shapes,
                       std::vector<at::ScalarType> param_dtypes,
                       std::optional<at::ScalarType> cast_inputs,
                       std::optional<at::ScalarType> cast_outputs, std::size_t module_count) {
             return std::make_shared<TorchUnit>(
                 layout,
                 UnitTensors{std::move(flat_shard), std::move(flat_gradient), std::move(shapes),
                             std::move(param_dtypes)},
                 ForwardCasts{cast_inputs, cast_outputs}, module_count);
           }),
           py::kw_only(), py::arg("layout"), py::arg("flat_shard"), py::arg("flat_gradient"),
           py::arg("shapes"), py::arg("param_dtypes"), py::arg("cast_inputs"),
           py::arg("cast_outputs"), py::arg("module_count"))
      .def("unsharded_views", &TorchUnit::unsharded_views)
      .def(
          "bind",
          [](TorchUnit& unit, py::list sharded, py::list unsharded, py::list gradients,
             const std::vector<std::tuple<py::dict, py::str, std::size_t>>& attributes) {
            std::vector<ModuleAttribute> bound;
            for (const auto& [parameters, name, parameter] : attributes) {
              bound.push_back({parameters, name, parameter});
            }
            unit.bind(std::move(sharded), std::move(unsharded), std::move(gradients),
                      std::move(bound));
          },
          py::arg("sharded"), py::arg("unsharded"), py::arg("gradients"), py::arg("attributes"))
      .def("pre_forward_hook",
           [](const std::shared_ptr<TorchUnit>& unit, std::size_t index) {
             return py::cpp_function(
                 [unit, index](py::handle module, py::handle args, py::handle kwargs) {
                   return unit->pre_forward(index, module, args, kwargs);
                 },
                 py::name("fsdp_pre_forward"));
           })
      .def("post_forward_hook",
           [](const std::shared_ptr<TorchUnit>& unit, std::size_t index) {
             return py::cpp_function(
                 [unit, index](py::handle /*module*/, py::handle /*args*/, py::handle output) {
                   return unit->post_forward(index, output);
                 },
                 py::name("fsdp_post_forward"));
           })
      .def_property_readonly("layout", &TorchUnit::layout)
      .def_property_readonly("number", &TorchUnit::number);
}

void register_unit_config(py::module_& m) {
  py::class_<UnitConfig>(m, "UnitConfig")
      .def(py::init([](std::string name, const UnitLayout& layout, int parent,
                       bool reshard_after_forward, bool reshard_after_backward, double pack_scale,
                       double reduce_scale, std::size_t bucket_bytes,
                       std::size_t max_message_bytes) {
             return UnitConfig{
                 std::move(name),        layout,     parent,       reshard_after_forward,
                 reshard_after_backward, pack_scale, reduce_scale, bucket_bytes,
                 max_message_bytes};
           }),
           py::kw_only(), py::arg("name"), py::arg("layout"), py::arg("parent") = -1,
           py::arg("reshard_after_forward") = true, py::arg("reshard_after_backward") = true,
           py::arg("pack_scale") = 1.0, py::arg("reduce_scale") = 1.0, py::arg("bucket_bytes") = 0,
           py::arg("max_message_bytes") = 0)
      .def_readonly("name", &UnitConfig::name)
      .def_readonly("layout", &UnitConfig::layout)
      .def_readonly("parent", &UnitConfig::parent)
      .def_readonly("reshard_after_forward", &UnitConfig::reshard_after_forward)
      .def_readonly("reshard_after_backward", &UnitConfig::reshard_after_backward)
      .def_readonly("pack_scale", &UnitConfig::pack_scale)
      .def_readonly("reduce_scale", &UnitConfig::reduce_scale)
      .def_readonly("bucket_bytes", &UnitConfig::bucket_bytes)
      .def_readonly("max_message_bytes", &UnitConfig::max_message_bytes);
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

void register_lanes(py::module_& m) {
  py::class_<Lanes, std::shared_ptr<Lanes>>(m, "Lanes")
      .def_static(
          "process_group",
          [](c10::intrusive_ptr<c10d::ProcessGroup> gather,
             c10::intrusive_ptr<c10d::ProcessGroup> reduce, double timeout,
             bool groups_one_by_one) {
            return make_process_group_lanes(std::move(gather), std::move(reduce),
                                            milliseconds(timeout), groups_one_by_one);
          },
          py::arg("gather_group"), py::arg("reduce_group"), py::arg("timeout"),
          py::arg("groups_one_by_one") = false)
      .def_static(
          "nccl",
          [](const std::vector<std::string>& libraries, const std::string& unique_id, int rank,
             int size, int device, double timeout, double host_timeout, bool register_buffers) {
            const py::gil_scoped_release no_gil;
            nccl::UniqueId id;
            FSDP_CHECK(unique_id.size() == sizeof(id), "a unique id expects ", sizeof(id),
                       " bytes but got ", unique_id.size());
            std::copy(unique_id.begin(), unique_id.end(), id.internal);
            return make_nccl_lanes(nccl::load(libraries), device, id,
                                   {rank, size, milliseconds(timeout), register_buffers},
                                   milliseconds(host_timeout));
          },
          py::arg("libraries"), py::arg("unique_id"), py::arg("rank"), py::arg("size"),
          py::arg("device"), py::arg("timeout"), py::arg("host_timeout"),
          py::arg("register_buffers"))
      .def_static(
          "shared_memory",
          [](const SharedMemoryEndpoint& endpoint, const std::vector<py::bytes>& addresses,
             int rank, double timeout, double host_timeout) {
            const std::vector<std::string> texts(addresses.begin(), addresses.end());
            const py::gil_scoped_release no_gil;
            return make_shared_memory_lanes(endpoint, texts, rank, milliseconds(timeout),
                                            milliseconds(host_timeout));
          },
          py::arg("endpoint"), py::arg("addresses"), py::arg("rank"), py::arg("timeout"),
          py::arg("host_timeout"))
      .def_static(
          "simulated",
          [](int device, int rank, int size, std::pair<double, double> gather,
             std::pair<double, double> reduce, double jitter, std::uint64_t seed,
             int multiprocessors, bool by_size, bool whole_traffic, double timeout) {
            SimulatedOptions options;
            options.rank = rank;
            options.size = size;
            options.gather = {gather.first, gather.second};
            options.reduce = {reduce.first, reduce.second};
            options.jitter = jitter;
            options.seed = seed;
            options.multiprocessors = multiprocessors;
            options.gather_by = by_size ? GatherBy::Size : GatherBy::Parameter;
            options.whole_traffic = whole_traffic;
            const py::gil_scoped_release no_gil;
            return make_simulated_lanes(device, options, milliseconds(timeout));
          },
          py::arg("device"), py::arg("rank"), py::arg("size"), py::arg("gather"), py::arg("reduce"),
          py::arg("jitter"), py::arg("seed"), py::arg("multiprocessors"), py::arg("by_size"),
          py::arg("whole_traffic"), py::arg("timeout"))
      .def_property_readonly("transport",
                             [](Lanes& lanes) { return lanes.gather.communicator().transport(); })
      .def_property_readonly("registered_buffers",
                             [](Lanes& lanes) {
                               return lanes.gather.communicator().registered_buffers() +
                                      lanes.reduce.communicator().registered_buffers();
                             })
      .def("check",
           [](Lanes& lanes) {
             lanes.gather.communicator().check();
             lanes.reduce.communicator().check();
           })
      .def(
          "all_gather",
          [](Lanes& lanes, const at::Tensor& input, at::Tensor& output) {
            const py::gil_scoped_release no_gil;
            run_all_gather(lanes, input, output);
          },
          py::arg("input"), py::arg("output"))
      .def(
          "reduce_scatter",
          [](Lanes& lanes, const at::Tensor& input, at::Tensor& output) {
            const py::gil_scoped_release no_gil;
            run_reduce_scatter(lanes, input, output);
          },
          py::arg("input"), py::arg("output"))
      .def(
          "all_reduce",
          [](Lanes& lanes, at::Tensor& data) {
            const py::gil_scoped_release no_gil;
            run_all_reduce(lanes, data);
          },
          py::arg("data"))
      .def(
          "broadcast",
          [](Lanes& lanes, at::Tensor& data, int root) {
            const py::gil_scoped_release no_gil;
            run_broadcast(lanes, data, root);
          },
          py::arg("data"), py::arg("root"))
      .def("input_buffer", &input_buffer, py::arg("bytes"))
      .def("barrier",
           [](Lanes& lanes) {
             const py::gil_scoped_release no_gil;
             run_barrier(lanes);
           })
      .def("stream_handle", [](Lanes& lanes, const std::string& name) {
        return reinterpret_cast<std::uintptr_t>(lane_named(lanes, name).stream().native_handle());
      });
}

void register_shared_memory(py::module_& m) {
  py::class_<SharedMemoryEndpoint>(m, "SharedMemoryEndpoint")
      .def(py::init<int>(), py::arg("name"))
      .def("address",
           [](const SharedMemoryEndpoint& endpoint) { return py::bytes(endpoint.address()); });
  m.def("shared_zeros", &shared_zeros, py::arg("bytes"));
  m.def("shared_memory_bytes", [] { return Arena::of_this_process()->allocated_bytes(); });
}

void register_nccl(py::module_& m) {
  m.def(
      "nccl_unique_id",
      [](const std::vector<std::string>& libraries) {
        const nccl::Api& api = nccl::load(libraries);
        nccl::UniqueId id;
        const nccl::Result result = api.GetUniqueId(&id);
        FSDP_CHECK(result == nccl::kSuccess,
                   "NCCL could not make a unique id: ", api.GetErrorString(result),
                   "; NCCL_SOCKET_IFNAME names the network interface");
        return py::bytes(id.internal, sizeof(id.internal));
      },
      py::arg("libraries"));
  m.def(
      "describe_nccl",
      [](const std::vector<std::string>& libraries) {
        const nccl::Api& api = nccl::load(libraries);
        return py::make_tuple(api.version_text(), api.path, api.registration());
      },
      py::arg("libraries"));
}

py::dict describe(const Bucket& bucket) {
  py::list units;
  for (const Unit* unit : bucket.units) {
    units.append(unit->number);
  }
  py::dict result;
  result["units"] = units;
  result["gather_bytes"] =
      bucket.layout.gather_bytes() * static_cast<std::size_t>(bucket.layout.world_size());
  result["reduce_bytes"] = bucket.reduce_input_bytes();
  result["unsharded_bytes"] = bucket.layout.unsharded_bytes();
  result["gather_plan"] = bucket.gathers.front().plan.name();
  result["gather_messages"] = bucket.gathers.size();
  result["reduce_messages"] = bucket.reductions.size();
  return result;
}

void register_root(py::module_& m) {
  py::class_<TorchRoot, std::shared_ptr<TorchRoot>>(m, "TorchRoot")
      .def(py::init([](std::shared_ptr<Lanes> lanes, int prefetch_depth, int nesting,
                       bool check_order, py::object when_stale) {
             return std::make_shared<TorchRoot>(
                 std::move(lanes), PipelineOptions{prefetch_depth, nesting, check_order},
                 std::move(when_stale));
           }),
           py::kw_only(), py::arg("lanes"), py::arg("prefetch_depth"), py::arg("nesting"),
           py::arg("check_order"), py::arg("when_stale"))
      .def("add_unit", &TorchRoot::add_unit, py::arg("unit"), py::arg("config"))
      .def("reset_iteration", &TorchRoot::reset_iteration)
      .def("unshard",
           [](TorchRoot& root, int unit) {
             const py::gil_scoped_release no_gil;
             root.pipeline().unshard(unit);
           })
      .def("wait_for_unshard",
           [](TorchRoot& root, int unit) {
             const py::gil_scoped_release no_gil;
             root.pipeline().wait_for_unshard(unit);
           })
      .def("reshard",
           [](TorchRoot& root, int unit) {
             const py::gil_scoped_release no_gil;
             root.pipeline().reshard(unit);
           })
      .def("state",
           [](TorchRoot& root, int unit) {
             switch (root.pipeline().unit(unit).state) {
               case UnitState::Sharded:
                 return "sharded";
               case UnitState::Gathering:
                 return "gathering";
               case UnitState::Unsharded:
                 return "unsharded";
             }
             return "unknown";
           })
      .def("gather_plan",
           [](TorchRoot& root, int unit) {
             return root.pipeline().bucket_of(unit).gathers.front().plan.name();
           })
      .def("buckets",
           [](TorchRoot& root) {
             py::list result;
             root.pipeline().bucket_of(0);
             for (const auto& bucket : root.pipeline().buckets()) {
               result.append(describe(*bucket));
             }
             return result;
           })
      .def("unsharded_bytes",
           [](TorchRoot& root) {
             py::list result;
             for (const auto& unit : root.units()) {
               result.append(unit->layout().unsharded_bytes());
             }
             return result;
           })
      .def("in_backward", [](TorchRoot& root) { return root.pipeline().in_backward(); })
      .def("set_reshard_after_forward",
           [](TorchRoot& root, int unit, bool value) {
             root.pipeline().set_reshard_after_forward(unit, value);
           })
      .def("set_reshard_after_backward",
           [](TorchRoot& root, int unit, bool value) {
             root.pipeline().set_reshard_after_backward(unit, value);
           })
      .def("set_requires_gradient_sync",
           [](TorchRoot& root, int unit, bool value) {
             root.pipeline().set_requires_gradient_sync(unit, value);
           })
      .def("set_gradient_scales",
           [](TorchRoot& root, int unit, double pack_scale, double reduce_scale) {
             root.pipeline().set_gradient_scales(unit, pack_scale, reduce_scale);
           })
      .def("set_bucket_bytes",
           [](TorchRoot& root, int unit, std::size_t bytes) {
             root.pipeline().set_bucket_bytes(unit, bytes);
           })
      .def("set_prefetch_depth",
           [](TorchRoot& root, int depth) { root.pipeline().set_prefetch_depth(depth); })
      .def("set_is_last_backward",
           [](TorchRoot& root, bool value) { root.pipeline().set_is_last_backward(value); })
      .def("set_forward_prefetch",
           [](TorchRoot& root, int unit, std::vector<int> targets) {
             root.pipeline().set_forward_prefetch(unit, std::move(targets));
           })
      .def("set_backward_prefetch",
           [](TorchRoot& root, int unit, std::vector<int> targets) {
             root.pipeline().set_backward_prefetch(unit, std::move(targets));
           })
      .def("set_poison_released_slots",
           [](TorchRoot& root, bool value) {
             root.pipeline().gatherer().set_poison_released_slots(value);
           })
      .def("delay_stream", [](TorchRoot& root, const std::string& stream,
                              double seconds) { root.delay_stream(stream, seconds); })
      .def("counters", &counters_of)
      .def("reset_counters", [](TorchRoot& root) { root.pipeline().ledger().reset(); })
      .def("enable_log",
           [](TorchRoot& root, bool value) { root.pipeline().ledger().enable_log(value); })
      .def("take_log", &take_log)
      .def(
          "keep_times",
          [](TorchRoot& root, std::size_t iterations) {
            const py::gil_scoped_release no_gil;
            root.keep_times(iterations);
          },
          py::arg("iterations"))
      .def("take_times", &take_times)
      .def("memory", [](TorchRoot& root) {
        const BufferRing* ring = root.pipeline().gatherer().ring();
        py::dict result;
        result["ring_slots"] = ring != nullptr ? ring->slots() : 0;
        result["ring_slot_bytes"] = ring != nullptr ? ring->slot_bytes() : 0;
        result["ring_bytes"] = ring != nullptr ? ring->allocated_bytes() : 0;
        result["staging_bytes"] = root.pipeline().gatherer().staging_bytes();
        result["reduce_bytes"] = root.pipeline().reducer().buffer_bytes();
        std::size_t of_units =
            0;  // gather inputs, homes of units that stay unsharded, accumulation
        for (const auto& bucket : root.pipeline().buckets()) {
          of_units += bucket->buffer_bytes();
        }
        result["unit_bytes"] = of_units;
        return result;
      });
}

}  // namespace
}  // namespace fsdp

PYBIND11_MODULE(_C, m) {
  fsdp::register_layout(m);
  fsdp::register_unit_config(m);
  fsdp::register_unit(m);
  fsdp::register_lanes(m);
  fsdp::register_shared_memory(m);
  fsdp::register_nccl(m);
  fsdp::register_packer(m);
  fsdp::register_plan(m);
  fsdp::register_root(m);
  m.def("note_optimizer_step", &fsdp::note_optimizer_step);
  m.attr("DIRECT_BYTES") = fsdp::kDirectBytes;
}
