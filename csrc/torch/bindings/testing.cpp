// Functions that only tests and benchmarks call.
#include <chrono>
#include <optional>
#include <tuple>

#include "base/check.h"
#include "core/record/ledger.h"
#include "core/schedule/pipeline.h"
#include "pack/pack.h"
#include "torch/bindings/registrations.h"
#include "torch/containers.h"
#include "torch/dtype.h"
#include "torch/step_checksum.h"
#include "torch/torch_root.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// `stream` ("gather", "reduce" or "all-reduce") pauses after its current work.
void delay_stream(TorchRoot& root, const std::string& stream, double seconds) {
  const bool is_of_replicas = stream == "all-reduce" && root.replicas() != nullptr;
  Lane& lane = is_of_replicas ? root.replicas()->reduce : lane_named(root.lanes(), stream);
  root.lanes().device->delay(lane.stream(), std::chrono::duration_cast<std::chrono::microseconds>(
                                                std::chrono::duration<double>(seconds)));
}

// A packer with a device of its own. Its work goes to the current stream.
class PyPacker {
 public:
  PyPacker(std::optional<int> gpu, int multiprocessors) {
    const auto timeout = std::chrono::milliseconds(60000);
    device_ = gpu ? make_cuda_device(*gpu, timeout, cuda_framework()) : make_host_device(timeout);
    packer_ = gpu ? make_cuda_packer(*device_, multiprocessors) : make_host_packer();
  }

  template <typename Plan>
  std::shared_ptr<Plan> prepare(Plan plan) {
    packer_->prepare(plan);
    return std::make_shared<Plan>(std::move(plan));
  }

  void pack(const PackPlan& plan, const std::vector<std::optional<at::Tensor>>& gradients,
            at::ScalarType gradient_dtype, at::Tensor& reduce_input, double scale, bool accumulate,
            const std::optional<at::Tensor>& marks) {
    FSDP_CHECK(gradients.size() == plan.entries.size(), "pack got ", gradients.size(),
               " gradients. The plan has ", plan.entries.size(), ".");
    std::vector<const void*> addresses;
    for (const auto& gradient : gradients) {
      addresses.push_back(gradient ? gradient->const_data_ptr() : nullptr);
    }
    packer_->pack(device_->compute_stream(), plan, addresses.data(), to_dtype(gradient_dtype),
                  reduce_input.mutable_data_ptr(), to_dtype(reduce_input.scalar_type()), scale,
                  accumulate,
                  {marks ? static_cast<std::uint64_t*>(marks->mutable_data_ptr()) : nullptr, 1});
  }

  void unpack(const UnpackPlan& plan, const at::Tensor& staging, at::Tensor& unsharded) {
    packer_->unpack(device_->compute_stream(), plan, staging.const_data_ptr(),
                    unsharded.mutable_data_ptr());
  }

  void cast(const CastPlan& plan, const at::Tensor& source, at::Tensor& destination, double scale,
            bool accumulate) {
    const std::vector<CastMode> modes(plan.entries.size(),
                                      accumulate ? CastMode::Add : CastMode::Write);
    packer_->cast(device_->compute_stream(), plan, modes.data(), source.const_data_ptr(),
                  destination.mutable_data_ptr(), scale);
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Packer> packer_;
};

using PyPackEntry = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using PyUnpackEntry = std::tuple<std::size_t, std::size_t, std::size_t, std::int64_t>;
using PyCastEntry =
    std::tuple<std::size_t, std::size_t, std::int64_t, at::ScalarType, at::ScalarType>;

void register_packer(py::module_& m) {
  py::class_<PackPlan, std::shared_ptr<PackPlan>>(m, "PackPlan");
  py::class_<UnpackPlan, std::shared_ptr<UnpackPlan>>(m, "UnpackPlan");
  py::class_<CastPlan, std::shared_ptr<CastPlan>>(m, "CastPlan");
  py::class_<PyPacker>(m, "Packer")
      .def(py::init<std::optional<int>, int>(), py::arg("gpu"), py::arg("multiprocessors") = 0)
      .def(
          "pack_plan",
          [](PyPacker& packer, const std::vector<PyPackEntry>& entries, std::int64_t segment_numel,
             int world_size) {
            PackPlan plan;
            for (const auto& [numel, chunk_numel, offset, runs] : entries) {
              plan.entries.push_back({numel, chunk_numel, offset, runs});
            }
            plan.segment_numel = segment_numel;
            plan.world_size = world_size;
            return packer.prepare(std::move(plan));
          },
          py::arg("entries"), py::arg("segment_numel"), py::arg("world_size"))
      .def(
          "unpack_plan",
          [](PyPacker& packer, const std::vector<PyUnpackEntry>& entries, std::size_t segment_bytes,
             int world_size) {
            UnpackPlan plan;
            for (const auto& [chunk_bytes, source, destination, runs] : entries) {
              plan.entries.push_back({chunk_bytes, source, destination, runs});
            }
            plan.segment_bytes = segment_bytes;
            plan.world_size = world_size;
            return packer.prepare(std::move(plan));
          },
          py::arg("entries"), py::arg("segment_bytes"), py::arg("world_size"))
      .def(
          "cast_plan",
          [](PyPacker& packer, const std::vector<PyCastEntry>& entries) {
            CastPlan plan;
            for (const auto& [source, destination, numel, from, to] : entries) {
              plan.entries.push_back({source, destination, numel, to_dtype(from), to_dtype(to)});
            }
            return packer.prepare(std::move(plan));
          },
          py::arg("entries"))
      .def("pack", &PyPacker::pack, py::arg("plan"), py::arg("gradients"),
           py::arg("gradient_dtype"), py::arg("reduce_input"), py::arg("scale"),
           py::arg("accumulate"), py::arg("marks") = std::nullopt)
      .def("unpack", &PyPacker::unpack, py::arg("plan"), py::arg("staging"), py::arg("unsharded"))
      .def("cast", &PyPacker::cast, py::arg("plan"), py::arg("source"), py::arg("destination"),
           py::arg("scale"), py::arg("accumulate"));
}

std::string name_of_units(TorchRoot& root, UnitRange units) {
  const std::string& name = root.pipeline().unit(units.first).name;
  return units.first == units.last ? name : name + " to " + root.pipeline().unit(units.last).name;
}

py::dict counters_of(TorchRoot& root) {
  const Counters& c = root.pipeline().ledger().counters();
  py::dict result;
  result["all_gathers"] = c.all_gathers;
  result["reduce_scatters"] = c.reduce_scatters;
  result["all_reduces"] = c.all_reduces;
  result["group_all_gathers"] = c.group_all_gathers;
  result["reused_unshards"] = c.reused_unshards;
  result["dropped_gathers"] = c.dropped_gathers;
  result["overflow_slots"] = c.overflow_slots;
  result["wire_bytes"] = c.wire_bytes;
  result["copied_bytes"] = c.copied_bytes;
  result["unsharded_bytes"] = c.unsharded_bytes;
  result["peak_unsharded_bytes"] = c.peak_unsharded_bytes;
  result["unsharded_units"] = c.unsharded_units;
  result["peak_unsharded_units"] = c.peak_unsharded_units;
  return result;
}

py::list take_log(TorchRoot& root) {
  static const char* const ops[] = {"all_gather", "reduce_scatter", "all_reduce",
                                    "group_all_gather"};
  py::list result;
  for (const CollectiveRecord& record : root.pipeline().ledger().take_log()) {
    result.append(py::make_tuple(ops[static_cast<int>(record.op)], name(record.phase),
                                 name_of_units(root, record.units), record.bytes));
  }
  return result;
}

void extend_lanes(py::module_& m) {
  py::class_<Lanes, std::shared_ptr<Lanes>> lanes_class = m.attr("Lanes");
  lanes_class
      .def_property_readonly("registered_buffers",
                             [](Lanes& lanes) {
                               return lanes.gather.registered_buffers() +
                                      lanes.reduce.registered_buffers();
                             })
      .def("all_reduce", &run_all_reduce, py::call_guard<py::gil_scoped_release>(), py::arg("data"))
      .def("stream_handle", [](Lanes& lanes, const std::string& name) {
        return reinterpret_cast<std::uintptr_t>(lane_named(lanes, name).stream().native_handle());
      });
}

void extend_root(py::module_& m) {
  py::class_<TorchRoot, std::shared_ptr<TorchRoot>> root_class = m.attr("TorchRoot");
  root_class
      .def("state",
           [](TorchRoot& root, int unit) {
             switch (root.pipeline().unit(unit).gather.state()) {
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
             const Bucket* const bucket = root.pipeline().unit(unit).bucket;
             FSDP_CHECK(bucket != nullptr, "The unit has no bucket before the first forward.");
             return bucket->gather.all_ranks().pieces.front().plan.name();
           })
      .def("set_poison_released_slots",
           [](TorchRoot& root, bool value) {
             root.pipeline().gatherer().set_poison_released_slots(value);
           })
      .def("delay_stream", &delay_stream)
      .def("counters", &counters_of)
      .def("reset_counters", [](TorchRoot& root) { root.pipeline().ledger().reset(); })
      .def("enable_log",
           [](TorchRoot& root, bool value) { root.pipeline().ledger().enable_log(value); })
      .def("take_log", &take_log);
}

}  // namespace

void register_testing(py::module_& m) {
  m.def("to_device", &to_device, py::arg("object"), py::arg("device"));
  m.def("hash_of", [](const at::Tensor& tensor) { return hash_of(tensor); }, py::arg("tensor"));
  m.def("hash_by_operators", &hash_by_operators, py::arg("tensor"));
  register_packer(m);
  extend_lanes(m);
  extend_root(m);
}

}  // namespace fsdp
