// Layouts, settings and plans: what can be asked before anything runs.
#include "core/memory/layout.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "core/units/bucket_plan.h"
#include "core/units/unit_config.h"
#include "torch/bindings/registrations.h"
#include "torch/dtype.h"
#include "torch/python_callbacks.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::int64_t numel_of(const std::vector<std::int64_t>& shape, std::size_t begin, std::size_t end) {
  std::int64_t numel = 1;
  for (std::size_t i = begin; i < end; ++i) {
    numel *= shape[i];
  }
  return numel;
}

// A parameter of `shape` that `ranks` share along dimension `shard_dim`.
ParamSpec make_param_spec(std::string name, const std::vector<std::int64_t>& shape,
                          std::size_t shard_dim, int ranks, at::ScalarType shard_dtype,
                          at::ScalarType param_dtype, bool trainable, bool gathered,
                          std::optional<at::ScalarType> grad_dtype,
                          std::optional<at::ScalarType> unsharded_grad_dtype, bool is_uniform) {
  ParamSpec spec;
  spec.name = std::move(name);
  const std::int64_t runs = numel_of(shape, 0, shard_dim);
  if (runs <= 1 || ranks == 1) {
    spec.rows = numel_of(shape, 0, shard_dim + 1);
    spec.row_numel = numel_of(shape, shard_dim + 1, shape.size());
  } else {
    FSDP_CHECK(shape.at(shard_dim) % ranks == 0, "Dimension ", shard_dim, " of parameter '",
               spec.name, "' has size ", shape.at(shard_dim), ". ", ranks,
               " ranks need a multiple of their number to share it.");
    spec.runs = runs;
    spec.rows = ranks;
    spec.row_numel = numel_of(shape, 0, shape.size()) / ranks;
  }
  spec.shard_dtype = to_dtype(shard_dtype);
  spec.param_dtype = to_dtype(param_dtype);
  if (spec.shard_dtype == DType::Bytes) {  // its elements are bytes
    spec.row_numel *= static_cast<std::int64_t>(c10::elementSize(shard_dtype));
  }
  spec.trainable = trainable;
  spec.gathered = gathered;
  if (grad_dtype.has_value()) {
    spec.grad_dtype = to_dtype(*grad_dtype);
  }
  if (unsharded_grad_dtype.has_value()) {
    spec.unsharded_grad_dtype = to_dtype(*unsharded_grad_dtype);
  }
  spec.chunk_multiple = is_uniform ? uniform_multiple(ranks) : 1;
  return spec;
}

py::dict describe(const PlannedBucket& bucket) {
  const auto ranks = static_cast<std::size_t>(bucket.layout.world_size());
  const BucketBuffers& buffers = bucket.use.buffers;
  py::dict result;
  result["units"] = bucket.units;
  result["gather_bytes"] = bucket.layout.gather_bytes() * ranks;
  result["reduce_bytes"] = buffers.reduce_output * ranks;
  result["unsharded_bytes"] = bucket.layout.unsharded_bytes();
  result["gather_plan"] = bucket.gather_plan;
  result["gather_messages"] = buffers.gather_messages;
  result["reduce_messages"] = buffers.reduce_messages;
  result["reshard_group"] = bucket.reshard_group;
  result["gather_input_bytes"] = buffers.gather_input;
  result["gradient_bytes"] = buffers.gradients;
  result["group_shard_bytes"] = buffers.group_shard;
  result["reshards_after_forward"] = bucket.use.reshards_after_forward;
  result["needs_cast"] = bucket.layout.needs_cast();
  result["needs_reduce_output"] = bucket.needs_reduce_output;
  return result;
}

py::dict describe(const BucketPlan& plan) {
  py::list buckets;
  for (const PlannedBucket& bucket : plan.buckets) {
    buckets.append(describe(bucket));
  }
  py::dict result;
  result["buckets"] = buckets;
  result["ring_slots"] = plan.gathers.ring.slots;
  result["ring_slot_bytes"] = plan.gathers.ring.slot_bytes;
  result["ring_bytes"] = plan.gathers.ring.bytes;
  result["staging_bytes"] = plan.gathers.staging_bytes;
  result["reduce_input_bytes"] = plan.reductions.input_bytes;
  result["packs_ahead"] = plan.reductions.packs_ahead;
  result["reduce_output_bytes"] = plan.reduce_output_bytes;
  result["kept_bytes"] = plan.kept_bytes;
  result["gather_input_bytes"] = plan.gathers.kept_input_bytes;
  result["group_shard_bytes"] = plan.group_shard_bytes;
  result["most_gradient_bytes"] = plan.reductions.most_gradients;
  result["message_staging_bytes"] = plan.message_staging_bytes;
  return result;
}

void register_unit_config(py::module_& m) {
  py::class_<UserCollective, std::shared_ptr<UserCollective>>(m, "UserCollective")
      .def(py::init(&make_python_user_collective), py::arg("weak_function"), py::arg("device"));
  py::class_<UnitUpdate, std::shared_ptr<UnitUpdate>>(m, "UnitUpdate")
      .def(py::init(&make_python_unit_update), py::arg("weak_function"), py::arg("measures"));
  py::class_<UnitSettings>(m, "UnitSettings")
      .def(py::init<>())
      .def_readwrite("reshard_after_forward", &UnitSettings::reshard_after_forward)
      .def_readwrite("reshard_group", &UnitSettings::reshard_group)
      .def_readwrite("reshard_after_backward", &UnitSettings::reshard_after_backward)
      .def_readwrite("keeps_slot_after_evaluation", &UnitSettings::keeps_slot_after_evaluation)
      .def_readwrite("unshards_in_backward", &UnitSettings::unshards_in_backward)
      .def_readwrite("requires_gradient_sync", &UnitSettings::requires_gradient_sync)
      .def_readwrite("reduces_unused", &UnitSettings::reduces_unused)
      .def_readwrite("pre_scale", &UnitSettings::pre_scale)
      .def_readwrite("post_scale", &UnitSettings::post_scale)
      .def_readwrite("bucket_bytes", &UnitSettings::bucket_bytes)
      .def_readwrite("is_unmergeable", &UnitSettings::is_unmergeable)
      .def_readwrite("reads_whole_output", &UnitSettings::reads_whole_output)
      .def_readwrite("is_summoned", &UnitSettings::is_summoned)
      .def_readwrite("forward_prefetch", &UnitSettings::forward_prefetch)
      .def_readwrite("backward_prefetch", &UnitSettings::backward_prefetch)
      .def_readwrite("reduce_hook", &UnitSettings::reduce_hook)
      .def_readwrite("communication_hook", &UnitSettings::communication_hook)
      .def_readwrite("gather_hook", &UnitSettings::gather_hook)
      .def_readwrite("scatter_hook", &UnitSettings::scatter_hook)
      .def_readwrite("update", &UnitSettings::update);
  py::class_<UnitConfig>(m, "UnitConfig")
      .def(py::init([](std::string name, const UnitLayout& layout, const UnitSettings& settings,
                       int parent, std::pair<std::size_t, std::size_t> message_limits, int mesh) {
             UnitConfig config(std::move(name), layout, settings);
             config.parent = parent;
             config.message_limits = {message_limits.first, message_limits.second};
             config.mesh = mesh;
             return config;
           }),
           py::kw_only(), py::arg("name"), py::arg("layout"), py::arg("settings"),
           py::arg("parent") = -1, py::arg("message_limits") = std::pair{0, 0},
           py::arg("mesh") = 0);
}

}  // namespace

void register_layout(py::module_& m) {
  py::class_<ParamSpec>(m, "ParamSpec")
      .def(py::init(&make_param_spec), py::kw_only(), py::arg("name"), py::arg("shape"),
           py::arg("shard_dim"), py::arg("ranks"), py::arg("shard_dtype"), py::arg("param_dtype"),
           py::arg("trainable"), py::arg("gathered") = true, py::arg("grad_dtype") = std::nullopt,
           py::arg("unsharded_grad_dtype") = std::nullopt, py::arg("is_uniform") = false);
  m.def("layout_order", &layout_order, py::arg("params"), py::arg("world_size"),
        py::arg("direct_bytes") = kDirectBytes);
  py::class_<ParamPlacement>(m, "ParamPlacement")
      .def_readonly("shard_offset", &ParamPlacement::shard_offset)
      .def_readonly("chunk_numel", &ParamPlacement::chunk_numel)
      .def_readonly("grad_offset", &ParamPlacement::grad_offset)
      .def_readonly("flat_gradient_offset", &ParamPlacement::flat_gradient_offset);
  py::class_<UnitLayout>(m, "UnitLayout")
      .def(py::init([](std::vector<ParamSpec> params, int world_size, at::ScalarType grad_dtype,
                       at::ScalarType reduce_dtype, std::size_t direct_bytes, bool is_offloaded) {
             return UnitLayout(std::move(params), world_size, to_dtype(grad_dtype),
                               to_dtype(reduce_dtype), direct_bytes, is_offloaded);
           }),
           py::arg("params"), py::arg("world_size"), py::arg("grad_dtype"), py::arg("reduce_dtype"),
           py::arg("direct_bytes") = kDirectBytes, py::arg("is_offloaded") = false)
      .def_property_readonly("world_size", &UnitLayout::world_size)
      .def_property_readonly(
          "reduce_dtype",
          [](const UnitLayout& layout) { return to_scalar_type(layout.reduce_dtype()); })
      .def_property_readonly("placements", &UnitLayout::placements)
      .def_property_readonly("shard_bytes", &UnitLayout::shard_bytes)
      .def_property_readonly("gather_bytes", &UnitLayout::gather_bytes)
      .def_property_readonly("unsharded_bytes", &UnitLayout::unsharded_bytes)
      .def_property_readonly("grad_numel", &UnitLayout::grad_numel)
      .def_property_readonly("gradient_bytes", &UnitLayout::gradient_bytes)
      .def("row_bytes", py::overload_cast<std::size_t>(&UnitLayout::row_bytes, py::const_));
  m.attr("DIRECT_BYTES") = kDirectBytes;
  register_unit_config(m);
  m.def(
      "plan_memory",
      [](const std::vector<UnitConfig>& units, const std::string& transport, bool on_gpu,
         int nesting, std::size_t prefetch_depth, bool has_prefetch_lists, bool keeps_gather_inputs,
         int replicas, const std::string& replica_transport) {
        return describe(
            plan_buckets(units, {usual_traits(transport, on_gpu), nesting, prefetch_depth,
                                 has_prefetch_lists, /*on_host=*/!on_gpu, keeps_gather_inputs,
                                 replicas, usual_traits(replica_transport, on_gpu)}));
      },
      py::arg("units"), py::kw_only(), py::arg("transport"), py::arg("on_gpu"), py::arg("nesting"),
      py::arg("prefetch_depth"), py::arg("has_prefetch_lists"), py::arg("keeps_gather_inputs"),
      py::arg("replicas"), py::arg("replica_transport"));
}

}  // namespace fsdp
