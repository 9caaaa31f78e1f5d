#include "torch/bindings/packer.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "pack/pack.h"
#include "torch/dtype.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// One packer with a device of its own; work goes to the current stream.
class PyPacker {
 public:
  explicit PyPacker(std::optional<int> gpu) {
    const auto timeout = std::chrono::milliseconds(60000);
    device_ = gpu ? make_cuda_device(*gpu, timeout, cuda_framework()) : make_host_device(timeout);
    packer_ = gpu ? make_cuda_packer(*device_) : make_host_packer();
  }

  template <typename Plan>
  std::shared_ptr<Plan> prepare(Plan plan) {
    packer_->prepare(plan);
    return std::make_shared<Plan>(std::move(plan));
  }

  void pack(const PackPlan& plan, const std::vector<std::optional<at::Tensor>>& gradients,
            at::ScalarType gradient_dtype, at::Tensor& reduce_input, double scale,
            bool accumulate) {
    FSDP_CHECK(gradients.size() == plan.entries.size(), "expects ", plan.entries.size(),
               " gradients but got ", gradients.size());
    std::vector<const void*> addresses;
    for (const auto& gradient : gradients) {
      addresses.push_back(gradient ? gradient->const_data_ptr() : nullptr);
    }
    packer_->pack(device_->compute_stream(), plan, addresses.data(), to_dtype(gradient_dtype),
                  reduce_input.mutable_data_ptr(), to_dtype(reduce_input.scalar_type()), scale,
                  accumulate);
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

}  // namespace

void register_packer(py::module_& m) {
  py::class_<PackPlan, std::shared_ptr<PackPlan>>(m, "PackPlan");
  py::class_<UnpackPlan, std::shared_ptr<UnpackPlan>>(m, "UnpackPlan");
  py::class_<CastPlan, std::shared_ptr<CastPlan>>(m, "CastPlan");
  py::class_<PyPacker>(m, "Packer")
      .def(py::init<std::optional<int>>(), py::arg("gpu"))
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
           py::arg("accumulate"))
      .def("unpack", &PyPacker::unpack, py::arg("plan"), py::arg("staging"), py::arg("unsharded"))
      .def("cast", &PyPacker::cast, py::arg("plan"), py::arg("source"), py::arg("destination"),
           py::arg("scale"), py::arg("accumulate"));
}

}  // namespace fsdp
