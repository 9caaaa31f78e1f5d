// The lanes of each transport.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/check.h"
#include "comm/liveness/process_identity.h"
#include "core/record/flight_recorder.h"
#include "torch/backend_messages.h"
#include "torch/bindings/registrations.h"
#include "torch/transports.h"

namespace py = pybind11;

namespace fsdp {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

GroupMembers members_of(int rank, std::vector<int> ranks,
                        const std::map<int, std::string>& processes) {
  GroupMembers members{rank, std::move(ranks), {}};
  for (const auto& [other, bytes] : processes) {
    const ProcessIdentity process = parse_identity(bytes);
    if (other != rank) {
      members.processes.emplace_back(other, process);
    }
  }
  return members;
}

FlightGroup flight_group(const Communicator& communicator, const std::string& name,
                         const std::string& what, const std::string& backend,
                         const std::vector<int>& ranks) {
  return {detail::concat(name, ".", what),
          detail::concat("fsdp_ext ", what, " over ", communicator.traits().name), backend, ranks,
          0};
}

void register_flights(py::module_& m) {
  py::class_<FlightRecorder, std::shared_ptr<FlightRecorder>>(m, "FlightRecorder")
      .def(py::init<int, std::size_t, std::string>(), py::kw_only(), py::arg("rank"),
           py::arg("entries"), py::arg("prefix"))
      .def(
          "record",
          [](FlightRecorder& recorder, Lanes& lanes, const std::string& name,
             const std::string& backend, const std::vector<int>& ranks) {
            for (Lane* lane : {&lanes.gather, &lanes.reduce}) {
              const bool gathers = lane == &lanes.gather;
              lane->communicator().set_flight_group(flight_group(
                  lane->communicator(), name, gathers ? "gather" : "reduce", backend, ranks));
            }
            recorder.record(lanes);
          },
          py::arg("lanes"), py::kw_only(), py::arg("name"), py::arg("backend"), py::arg("ranks"))
      .def_property_readonly("path", &FlightRecorder::path)
      .def(
          "write",
          [](const FlightRecorder& recorder, const std::string& path) {
            const py::gil_scoped_release no_gil;
            recorder.write(path);
          },
          py::arg("path"))
      .def("turn", &FlightRecorder::turn, py::arg("on"));
}

void register_shared_memory(py::module_& m) {
  py::class_<SharedMemoryEndpoint>(m, "SharedMemoryEndpoint")
      .def(py::init<int>(), py::arg("rank"))
      .def("address",
           [](const SharedMemoryEndpoint& endpoint) { return py::bytes(endpoint.address()); })
      .def(
          "connect_on_host",
          [](const SharedMemoryEndpoint& endpoint, const std::vector<py::bytes>& addresses,
             const std::vector<int>& hosts, int rank, double timeout) {
            const std::vector<std::string> texts(addresses.begin(), addresses.end());
            const py::gil_scoped_release no_gil;
            return endpoint.connect_on_host(texts, HostMap(hosts), rank, milliseconds(timeout));
          },
          py::arg("addresses"), py::arg("hosts"), py::arg("rank"), py::arg("timeout"));
  py::class_<HostLanes>(m, "HostLanes");
  m.def("shared_zeros", &shared_zeros, py::arg("bytes"));
  m.def("shared_memory_bytes", [] { return Arena::of_this_process()->allocated_bytes(); });
}

void register_processes(py::module_& m) {
  m.def("process_identity", [] {
    const ProcessIdentity identity = identity_of_this_process();
    return py::bytes(reinterpret_cast<const char*>(&identity), sizeof(identity));
  });
  m.def(
      "plain_text", [](const std::string& message) { return plain_text(message); },
      py::arg("message"));
  // None for a process on another host, whose state cannot be looked up.
  m.def(
      "ended_process",
      [](const std::string& identity) -> std::optional<std::int64_t> {
        const ProcessIdentity process = parse_identity(identity);
        const bool has_ended = can_look_up(process) && state_of(process) == ProcessState::Ended;
        return has_ended ? std::make_optional(process.pid) : std::nullopt;
      },
      py::arg("identity"));
}

nccl::LaneSettings lane_settings(const std::map<std::string, int>& given) {
  nccl::LaneSettings settings;
  const std::map<std::string, int*> fields = {{"min_ctas", &settings.min_ctas},
                                              {"max_ctas", &settings.max_ctas},
                                              {"cluster_size", &settings.cluster_size},
                                              {"cta_policy", &settings.cta_policy}};
  for (const auto& [name, value] : given) {
    *fields.at(name) = value;
  }
  return settings;
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
        return py::make_tuple(api.version_text(), api.path, api.registration(),
                              api.registers_between_nodes());
      },
      py::arg("libraries"));
}

using LanesClass = py::class_<Lanes, std::shared_ptr<Lanes>>;

void register_traits(LanesClass& bound) {
  const auto trait = [&bound](const char* name, auto field) {
    bound.def_property_readonly(
        name, [field](Lanes& lanes) { return lanes.gather.communicator().traits().*field; });
  };
  trait("transport", &TransportTraits::name);
  trait("is_simulated", &TransportTraits::is_simulated);
  trait("is_inline", &TransportTraits::is_inline);
  trait("is_composed", &TransportTraits::is_composed);
  trait("sums_in_rank_order", &TransportTraits::sums_in_rank_order);
  trait("flight_backend", &TransportTraits::flight_backend);
  trait("hosts", &TransportTraits::hosts);
}

void register_transports(LanesClass& bound) {
  bound
      .def_static(
          "process_group",
          [](c10::intrusive_ptr<c10d::ProcessGroup> gather,
             c10::intrusive_ptr<c10d::ProcessGroup> reduce, double timeout,
             c10::intrusive_ptr<c10d::Store> store, const std::vector<int>& ranks,
             const std::map<int, std::string>& processes, HostLanes* on_host,
             bool groups_one_by_one) {
            const int rank = ranks.at(static_cast<std::size_t>(gather->getRank()));
            return make_process_group_lanes(std::move(gather), std::move(reduce),
                                            members_of(rank, ranks, processes), std::move(store),
                                            milliseconds(timeout), groups_one_by_one,
                                            on_host != nullptr ? std::move(*on_host) : HostLanes());
          },
          py::arg("gather_group"), py::arg("reduce_group"), py::arg("timeout"), py::kw_only(),
          py::arg("store"), py::arg("ranks"), py::arg("processes") = std::map<int, std::string>(),
          py::arg("on_host") = nullptr, py::arg("groups_one_by_one") = false)
      .def_static(
          "inline",
          [](const py::object& collectives, int rank, const std::vector<int>& ranks,
             double timeout) {
            const InlineRank place{rank, static_cast<int>(ranks.size()),
                                   ranks.at(static_cast<std::size_t>(rank))};
            return make_inline_lanes(collectives, place, milliseconds(timeout));
          },
          py::arg("collectives"), py::kw_only(), py::arg("rank"), py::arg("ranks"),
          py::arg("timeout"))
      .def_static(
          "nccl",
          [](const std::vector<std::string>& libraries, const std::string& unique_id, int rank,
             int size, int device, double timeout, double host_timeout, bool register_buffers,
             int nodes, const std::map<std::string, int>& gather_settings,
             const std::map<std::string, int>& reduce_settings, int pack_multiprocessors,
             c10::intrusive_ptr<c10d::Store> store, const std::vector<int>& ranks,
             const std::map<int, std::string>& processes) {
            const py::gil_scoped_release no_gil;
            const int global_rank = ranks.at(static_cast<std::size_t>(rank));
            nccl::UniqueId id;
            FSDP_CHECK(unique_id.size() == sizeof(id), "The NCCL unique id has ", unique_id.size(),
                       " bytes, not ", sizeof(id), ". Pass the result of nccl_unique_id().");
            std::copy(unique_id.begin(), unique_id.end(), id.internal);
            return make_nccl_lanes(
                nccl::load(libraries), device, id,
                {rank, size, milliseconds(timeout), register_buffers,
                 lane_settings(gather_settings), lane_settings(reduce_settings), nodes},
                std::move(store), members_of(global_rank, ranks, processes), pack_multiprocessors,
                milliseconds(host_timeout));
          },
          py::kw_only(), py::arg("libraries"), py::arg("unique_id"), py::arg("rank"),
          py::arg("size"), py::arg("device"), py::arg("timeout"), py::arg("host_timeout"),
          py::arg("register_buffers"), py::arg("nodes"), py::arg("gather_settings"),
          py::arg("reduce_settings"), py::arg("pack_multiprocessors"), py::arg("store"),
          py::arg("ranks"), py::arg("processes"))
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
             std::pair<double, double> reduce, int multiprocessors, int pack_multiprocessors,
             bool moves_memory, double timeout) {
            SimulatedOptions options;
            options.moves_memory = moves_memory;
            options.rank = rank;
            options.size = size;
            options.gather = {gather.first, gather.second};
            options.reduce = {reduce.first, reduce.second};
            options.multiprocessors = multiprocessors;
            options.on_gpu = device >= 0;
            const py::gil_scoped_release no_gil;
            return make_simulated_lanes(device, options, pack_multiprocessors,
                                        milliseconds(timeout));
          },
          py::kw_only(), py::arg("device"), py::arg("rank"), py::arg("size"), py::arg("gather"),
          py::arg("reduce"), py::arg("multiprocessors"), py::arg("pack_multiprocessors"),
          py::arg("moves_memory"), py::arg("timeout"));
}

void register_groups(LanesClass& bound) {
  bound
      .def(
          "add_group",
          [](Lanes& lanes, const std::shared_ptr<Lanes>& group) { lanes.groups.push_back(group); },
          py::arg("group"))
      .def("has_group_of", &Lanes::has_group_of, py::arg("ranks"))
      .def(
          "add_mesh",
          [](Lanes& lanes, const std::shared_ptr<Lanes>& mesh, std::vector<int> ranks) {
            lanes.meshes.push_back({mesh, std::move(ranks)});
            return lanes.meshes.size();
          },
          py::arg("lanes"), py::arg("ranks"))
      .def(
          "mesh_of",
          [](Lanes& lanes, const std::vector<int>& ranks) -> std::optional<std::size_t> {
            for (std::size_t i = 0; i < lanes.meshes.size(); ++i) {
              if (lanes.meshes[i].ranks == ranks) {
                return i + 1;
              }
            }
            return std::nullopt;
          },
          py::arg("ranks"));
}

void register_use(LanesClass& bound) {
  bound.def_property_readonly("flights", [](Lanes& lanes) { return lanes.flights; })
      .def_property_readonly("message_staging_bytes",
                             [](Lanes& lanes) { return message_staging_bytes(lanes); })
      .def("check",
           [](Lanes& lanes) {
             try {
               lanes.gather.communicator().check();
               lanes.reduce.communicator().check();
             } catch (const Error& error) {
               throw_with_flight_record(error, lanes, nullptr);
             }
           })
      .def("all_gather", &run_all_gather, py::call_guard<py::gil_scoped_release>(),
           py::arg("input"), py::arg("output"))
      .def("reduce_scatter", &run_reduce_scatter, py::call_guard<py::gil_scoped_release>(),
           py::arg("input"), py::arg("output"))
      .def(
          "exchange_messages",
          [](Lanes& lanes, const std::string& mine) {
            std::string all;
            {
              const py::gil_scoped_release no_gil;
              all = exchange_messages(lanes, mine);
            }
            return py::bytes(all);
          },
          py::arg("mine"))
      .def(
          "input_buffer",
          [](Lanes& lanes, std::int64_t bytes, const std::string& lane) {
            return lane_buffer(lanes, bytes, lane, BufferUse::Input);
          },
          py::arg("bytes"), py::arg("lane") = "gather")
      .def(
          "output_buffer",
          [](Lanes& lanes, std::int64_t bytes, const std::string& lane) {
            return lane_buffer(lanes, bytes, lane, BufferUse::Output);
          },
          py::arg("bytes"), py::arg("lane") = "gather");
}

}  // namespace

void register_lanes(py::module_& m) {
  register_flights(m);
  LanesClass bound(m, "Lanes");
  register_traits(bound);
  register_transports(bound);
  register_groups(bound);
  register_use(bound);
  register_shared_memory(m);
  register_processes(m);
  register_nccl(m);
}

}  // namespace fsdp
