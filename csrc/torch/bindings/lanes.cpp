// The lanes of each transport.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/check.h"
#include "comm/process_identity.h"
#include "torch/bindings/registrations.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

// Leaves out processes on other hosts, whose state cannot be looked up.
GroupMembers members_of(int rank, const std::map<int, std::string>& processes) {
  GroupMembers members{rank, {}};
  for (const auto& [other, bytes] : processes) {
    const ProcessIdentity process = parse_identity(bytes);
    if (other != rank && share_pid_namespace(process, identity_of_this_process())) {
      members.processes.emplace_back(other, process);
    }
  }
  return members;
}

void register_shared_memory(py::module_& m) {
  py::class_<SharedMemoryEndpoint>(m, "SharedMemoryEndpoint")
      .def(py::init<int>(), py::arg("rank"))
      .def("address",
           [](const SharedMemoryEndpoint& endpoint) { return py::bytes(endpoint.address()); });
  m.def("shared_zeros", &shared_zeros, py::arg("bytes"));
  m.def("shared_memory_bytes", [] { return Arena::of_this_process()->allocated_bytes(); });
}

void register_processes(py::module_& m) {
  m.def("process_identity", [] {
    const ProcessIdentity identity = identity_of_this_process();
    return py::bytes(reinterpret_cast<const char*>(&identity), sizeof(identity));
  });
  m.def("plain_text", &plain_text, py::arg("message"));
  // None for a process on another host, whose state cannot be looked up.
  m.def(
      "ended_process",
      [](const std::string& identity) -> std::optional<std::int64_t> {
        const ProcessIdentity process = parse_identity(identity);
        const bool is_here = share_pid_namespace(process, identity_of_this_process());
        const bool has_ended = is_here && state_of(process) == ProcessState::Ended;
        return has_ended ? std::make_optional(process.pid) : std::nullopt;
      },
      py::arg("identity"));
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
                   ". Set NCCL_SOCKET_IFNAME to the network interface.");
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

}  // namespace

void register_lanes(py::module_& m) {
  py::class_<Lanes, std::shared_ptr<Lanes>>(m, "Lanes")
      .def_static(
          "process_group",
          [](c10::intrusive_ptr<c10d::ProcessGroup> gather,
             c10::intrusive_ptr<c10d::ProcessGroup> reduce,
             c10::intrusive_ptr<c10d::ProcessGroup> exchange, double timeout, int rank,
             const std::map<int, std::string>& processes, bool groups_one_by_one) {
            return make_process_group_lanes(std::move(gather), std::move(reduce),
                                            std::move(exchange), members_of(rank, processes),
                                            milliseconds(timeout), groups_one_by_one);
          },
          py::arg("gather_group"), py::arg("reduce_group"), py::arg("exchange_group"),
          py::arg("timeout"), py::arg("global_rank") = 0,
          py::arg("processes") = std::map<int, std::string>(), py::arg("groups_one_by_one") = false)
      .def_static(
          "nccl",
          [](const std::vector<std::string>& libraries, const std::string& unique_id, int rank,
             int size, int device, double timeout, double host_timeout, bool register_buffers) {
            const py::gil_scoped_release no_gil;
            nccl::UniqueId id;
            FSDP_CHECK(unique_id.size() == sizeof(id), "The NCCL unique id has ", unique_id.size(),
                       " bytes, not ", sizeof(id), ". Pass the result of nccl_unique_id().");
            std::copy(unique_id.begin(), unique_id.end(), id.internal);
            return make_nccl_lanes(nccl::load(libraries), device, id,
                                   {rank, size, milliseconds(timeout), register_buffers},
                                   milliseconds(host_timeout));
          },
          py::kw_only(), py::arg("libraries"), py::arg("unique_id"), py::arg("rank"),
          py::arg("size"), py::arg("device"), py::arg("timeout"), py::arg("host_timeout"),
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
             int multiprocessors, bool whole_traffic, double timeout) {
            SimulatedOptions options;
            options.rank = rank;
            options.size = size;
            options.gather = {gather.first, gather.second};
            options.reduce = {reduce.first, reduce.second};
            options.jitter = jitter;
            options.seed = seed;
            options.multiprocessors = multiprocessors;
            options.gather_by = gather_by_of("simulated", /*on_gpu=*/device >= 0);
            options.whole_traffic = whole_traffic;
            const py::gil_scoped_release no_gil;
            return make_simulated_lanes(device, options, milliseconds(timeout));
          },
          py::kw_only(), py::arg("device"), py::arg("rank"), py::arg("size"), py::arg("gather"),
          py::arg("reduce"), py::arg("jitter"), py::arg("seed"), py::arg("multiprocessors"),
          py::arg("whole_traffic"), py::arg("timeout"))
      .def_property_readonly("transport",
                             [](Lanes& lanes) { return lanes.gather.communicator().transport(); })
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
      .def("input_buffer", &input_buffer, py::arg("bytes"));
  register_shared_memory(m);
  register_processes(m);
  register_nccl(m);
}

}  // namespace fsdp
