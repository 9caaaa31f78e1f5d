#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "core/record/flight_recorder.h"
#include "core/record/ledger.h"
#include "core/schedule/pipeline.h"
#include "torch/bindings/registrations.h"
#include "torch/torch_root.h"

namespace py = pybind11;

namespace fsdp {
namespace {

const char* name_of(Work work) {
  static const char* const names[] = {"cast",
                                      "gather",
                                      "unpack",
                                      "pack",
                                      "reduce",
                                      "all-reduce",
                                      "finish reduction",
                                      "wait (gather)",
                                      "wait (reduction)",
                                      "unit forward",
                                      "unit backward",
                                      "forward",
                                      "backward",
                                      "group gather",
                                      "keep",
                                      "update",
                                      "step"};
  return names[static_cast<int>(work)];
}

// "forward" or "backward" if one runs and has not failed, and otherwise "idle".
const char* phase(TorchRoot& root) {
  const Passes& passes = *root.pipeline().passes();
  if (passes.has_failed()) {
    return "idle";
  }
  return passes.in_backward() ? "backward" : passes.in_forward() ? "forward" : "idle";
}

// Whether there are gradients of backwards without gradient sync, packed or shown.
bool has_unreduced(TorchRoot& root) {
  return have_accumulated(root.pipeline().units().buckets()) ||
         std::any_of(root.units().begin(), root.units().end(),
                     [](const auto& unit) { return unit->shown_gradients().any(); });
}

// Blocks until all work issued so far is done.
void synchronize(TorchRoot& root) try {
  for (Lanes* const lanes : {&root.lanes(), root.replicas()}) {
    if (lanes != nullptr) {
      lanes->gather.synchronize();
      lanes->reduce.synchronize();
    }
  }
  root.lanes().device->compute_stream().synchronize();
} catch (const Error& error) {
  throw_with_flight_record(error, root.lanes(), root.replicas());
}

// Keeps the times of the last `iterations` iterations; 0 keeps none. Streams may still write
// earlier moments, so they are drained first. An error of a stream is left to the next wait for its
// work.
void keep_times(TorchRoot& root, std::size_t iterations) {
  const py::gil_scoped_release no_gil;
  bool drained = true;
  try {
    synchronize(root);
  } catch (const std::exception&) {
    drained = false;
  }
  Pipeline& pipeline = root.pipeline();
  // A unit has a forward, a backward, waits and messages. More moments are made when they are
  // needed.
  pipeline.ledger().keep_times(iterations, 24 * (pipeline.units().all().size() + 1), drained);
}

// The fields of class Span in fsdp_ext/profiler/recording.py, where they are documented. A time
// that was not recorded is 0.
py::dict describe(const TimedSpan& timed) {
  py::dict result;
  result["work"] = name_of(timed.span.work);
  result["phase"] = name(timed.span.phase);
  result["first"] = timed.span.units.first;
  result["last"] = timed.span.units.last;
  result["nbytes"] = timed.collective.bytes;
  result["begin"] = timed.begin;
  result["end"] = timed.end;
  result["issued"] = timed.issued;
  result["refused"] = timed.refused;
  result["possible"] = timed.possible;
  result["lead"] = timed.lead;
  result["on_demand"] = timed.collective.issue.on_demand;
  return result;
}

// Returns the number and the spans of each iteration, and how many earlier iterations were
// overwritten.
py::tuple take_times(TorchRoot& root) {
  Ledger& ledger = root.pipeline().ledger();
  const std::uint64_t lost = ledger.lost_iterations();
  std::vector<IterationTimes> taken;
  {
    const py::gil_scoped_release no_gil;
    synchronize(root);
    taken = ledger.take_times();
  }
  py::list iterations;
  for (const IterationTimes& iteration : taken) {
    py::list spans;
    for (const TimedSpan& timed : iteration.spans) {
      spans.append(describe(timed));
    }
    iterations.append(py::make_tuple(iteration.number, spans));
  }
  return py::make_tuple(iterations, lost);
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
  result["reduce_bytes"] = bucket.reduction.input_bytes();
  result["unsharded_bytes"] = bucket.layout.unsharded_bytes();
  result["gather_plan"] = bucket.gather.all_ranks().pieces.front().plan.name();
  result["gather_messages"] = bucket.gather.all_ranks().pieces.size();
  result["reduce_messages"] = bucket.reduction.pieces().size();
  const GroupShard* const group = bucket.gather.group();
  result["reshard_group"] = group != nullptr ? group->source.communicator.size() : 0;
  result["group_shard_bytes"] = bucket.buffers.group_shard;
  return result;
}

py::dict memory_of(TorchRoot& root) {
  const BufferRing* ring = root.pipeline().gatherer().ring();
  std::size_t of_buckets = 0;
  for (const auto& bucket : root.pipeline().units().buckets()) {
    of_buckets += bucket->buffer_bytes();
  }
  py::dict result;
  result["ring_slots"] = ring != nullptr ? ring->plan().slots : 0;
  result["ring_slot_bytes"] = ring != nullptr ? ring->plan().slot_bytes : 0;
  result["ring_bytes"] = ring != nullptr ? ring->allocated_bytes() : 0;
  result["staging_bytes"] = root.pipeline().gatherer().staging_bytes();
  result["reduce_bytes"] = root.pipeline().reducer().buffer_bytes();
  result["bucket_buffer_bytes"] = of_buckets;
  result["message_staging_bytes"] =
      message_staging_bytes(root.lanes()) +
      (root.replicas() != nullptr ? message_staging_bytes(*root.replicas()) : 0);
  return result;
}

py::list all_gather(TorchRoot& root, const std::string& what, const std::string& mine) {
  std::vector<std::string> messages;
  try {
    const py::gil_scoped_release no_gil;
    messages = root.pipeline().exchange().all_gather(what, mine);
  } catch (const Error& error) {
    throw_with_flight_record(error, root.lanes(), root.replicas());
  }
  py::list result;
  for (const std::string& message : messages) {
    result.append(py::bytes(message));
  }
  return result;
}

// Calls a method with the calling thread as the root's user. Methods of the pipeline run without
// the GIL.
template <typename... Arguments>
auto as_owner(void (TorchRoot::*method)(Arguments...)) {
  return [method](TorchRoot& root, Arguments... arguments) {
    const UseOfRoot use(root);
    (root.*method)(arguments...);
  };
}

auto as_owner(void (Pipeline::*method)(int unit)) {
  return [method](TorchRoot& root, int unit) {
    const UseOfRoot use(root);
    const py::gil_scoped_release no_gil;
    (root.pipeline().*method)(unit);
  };
}

using RootClass = py::class_<TorchRoot, std::shared_ptr<TorchRoot>>;

void register_lifecycle(RootClass& bound) {
  bound.def("add_unit", &TorchRoot::add_unit, py::arg("unit"), py::arg("config"))
      .def("phase", &phase)
      .def("reset_iteration", as_owner(&TorchRoot::reset_iteration))
      .def("recover", as_owner(&TorchRoot::recover))
      .def("awaits_finalization", &TorchRoot::awaits_finalization)
      .def("set_awaits_finalization", &TorchRoot::set_awaits_finalization)
      .def("set_handle_pending", &TorchRoot::set_handle_pending)
      .def("set_before_backward", &TorchRoot::set_before_backward)
      .def("leave_if_idle", &TorchRoot::leave_if_idle)
      .def("needs_new_units", &TorchRoot::needs_new_units)
      .def("accept_module_changes", &TorchRoot::accept_module_changes, py::arg("may_train"))
      .def("refuse_after_capture",
           [](TorchRoot& root) { root.pipeline().units().refuse_after_capture(); })
      .def("retire", &TorchRoot::retire)
      // Whether autograd's graph or a captured CUDA graph still needs its units.
      .def("is_needed_by_graph",
           [](TorchRoot& root) {
             return root.weak_from_this().use_count() > 1 ||
                    root.pipeline().gatherer().has_been_captured();
           })
      .def("abandon_forward",
           [](TorchRoot& root, std::size_t unit) { root.abandon_forward(*root.units().at(unit)); });
}

void register_schedule(RootClass& bound) {
  bound.def("unshard", as_owner(&TorchRoot::unshard))
      .def("wait_for_unshard", as_owner(&Pipeline::wait_for_unshard))
      .def("reshard", as_owner(&Pipeline::reshard))
      .def("prefetch_next_forward", as_owner(&TorchRoot::prefetch_next_forward))
      .def("invalidate",
           [](TorchRoot& root, int unit) {
             const UseOfRoot use(root);
             if (Bucket* const bucket = root.pipeline().unit(unit).bucket) {
               root.pipeline().gatherer().invalidate(*bucket);
             }
           })
      .def("form_buckets", [](TorchRoot& root) {
        const UseOfRoot use(root);
        const py::gil_scoped_release no_gil;  // it waits for the lanes
        root.pipeline().form_buckets();
      });
}

void register_gradients(RootClass& bound) {
  bound.def("reduce_accumulated", as_owner(&TorchRoot::reduce_accumulated))
      .def("wait_for_reductions", as_owner(&TorchRoot::wait_for_reductions))
      .def("units_with_nonfinite",
           [](TorchRoot& root) {
             const UseOfRoot use(root);
             const py::gil_scoped_release no_gil;  // it waits for the device
             Pipeline& pipeline = root.pipeline();
             const auto found = pipeline.reducer().nonfinite_gradients().find(
                 pipeline.units().buckets(), root.units().size());
             return std::vector<bool>(found.begin(), found.end());
           })
      .def("accumulated",
           [](TorchRoot& root, int unit) {
             const UseOfRoot use(root);
             return accumulated_gradients(root, unit);
           })
      .def("has_accumulated",
           [](TorchRoot& root, int unit) {
             const auto has = Reducer::has_accumulated(root.pipeline().unit(unit));
             return std::vector<bool>(has.begin(), has.end());
           })
      .def("set_accumulated",
           [](TorchRoot& root, int unit, const std::vector<bool>& has) {
             const UseOfRoot use(root);
             Pipeline& pipeline = root.pipeline();
             pipeline.reducer().set_accumulated(pipeline.unit(unit), {has.begin(), has.end()});
             return accumulated_gradients(root, unit);
           })
      .def("awaits_reduction",
           [](TorchRoot& root, int unit) {
             return root.pipeline().unit(unit).gradients.awaits_reduction();
           })
      .def("take_left_out", [](TorchRoot& root) { return root.pipeline().take_left_out(); })
      .def("has_unreduced", &has_unreduced)
      .def("shown",
           [](TorchRoot& root, std::size_t unit) {
             std::vector<std::pair<bool, std::optional<at::Tensor>>> result;
             for (const auto& shown : root.units().at(unit)->shown_gradients().shown()) {
               result.emplace_back(shown.is_shown, shown.put_aside.defined()
                                                       ? std::make_optional(shown.put_aside)
                                                       : std::nullopt);
             }
             return result;
           })
      .def("adopt_shown", [](TorchRoot& root, std::size_t unit, std::size_t trainable,
                             const std::optional<at::Tensor>& put_aside) {
        root.units().at(unit)->shown_gradients().adopt(trainable,
                                                       {true, put_aside.value_or(at::Tensor())});
      });
}

void register_settings(RootClass& bound) {
  bound.def("apply", &TorchRoot::apply, py::arg("unit"), py::arg("settings"))
      .def("set_prefetch_depth",
           [](TorchRoot& root, int depth) { root.pipeline().options().prefetch_depth = depth; })
      .def("set_is_last_backward",
           [](TorchRoot& root, bool value) { root.pipeline().options().is_last_backward = value; })
      .def("pre_scale",
           [](TorchRoot& root, int unit) { return root.pipeline().unit(unit).pre_scale; })
      .def("layout_of",
           [](TorchRoot& root, int unit) { return root.pipeline().unit(unit).layout; });
}

void register_measurements(RootClass& bound) {
  bound
      .def("buckets",
           [](TorchRoot& root) {
             py::list result;
             for (const auto& bucket : root.pipeline().units().buckets()) {
               result.append(describe(*bucket));
             }
             return result;
           })
      .def("keep_times", &keep_times, py::arg("iterations"))
      .def("take_times", &take_times)
      .def("begin_step", [](TorchRoot& root) { root.pipeline().ledger().begin_step(); })
      .def("end_step", [](TorchRoot& root) { root.pipeline().ledger().end_step(); })
      .def("memory", &memory_of)
      .def("all_gather", &all_gather, py::arg("what"), py::arg("mine"));
}

}  // namespace

void register_root(py::module_& m) {
  py::class_<StepChecks, std::shared_ptr<StepChecks>>(m, "StepChecks")
      .def(py::init<std::int64_t, py::object>(), py::kw_only(), py::arg("every"),
           py::arg("compare"))
      .def_property_readonly("step", &StepChecks::step);
  RootClass bound(m, "TorchRoot");
  bound.def(py::init([](std::shared_ptr<Lanes> lanes, std::shared_ptr<Lanes> replicas,
                        int prefetch_depth, int nesting, bool has_peers, bool check_order,
                        bool keeps_gather_inputs, std::vector<int> mesh_ranks,
                        py::object when_stale, std::shared_ptr<StepChecks> checks) {
              PipelineOptions options{prefetch_depth,      nesting,
                                      has_peers,           check_order,
                                      keeps_gather_inputs, std::move(mesh_ranks)};
              return std::make_shared<TorchRoot>(std::move(lanes), std::move(replicas),
                                                 std::move(options), std::move(when_stale),
                                                 std::move(checks));
            }),
            py::kw_only(), py::arg("lanes"), py::arg("replicas"), py::arg("prefetch_depth"),
            py::arg("nesting"), py::arg("has_peers"), py::arg("check_order"),
            py::arg("keeps_gather_inputs"), py::arg("mesh_ranks"), py::arg("when_stale"),
            py::arg("checks"));
  register_lifecycle(bound);
  register_schedule(bound);
  register_gradients(bound);
  register_settings(bound);
  register_measurements(bound);
}

}  // namespace fsdp
