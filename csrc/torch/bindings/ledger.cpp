#include "torch/bindings/ledger.h"

#include <string>
#include <vector>

#include "core/ledger.h"

namespace py = pybind11;

namespace fsdp {
namespace {

const char* name_of(Phase phase) {
  static const char* const names[] = {"forward", "backward", "other"};
  return names[static_cast<int>(phase)];
}

const char* name_of(Work work) {
  static const char* const names[] = {
      "cast",          "gather",           "unpack",       "pack",          "reduce",  "hand over",
      "wait (gather)", "wait (reduction)", "unit forward", "unit backward", "forward", "backward"};
  return names[static_cast<int>(work)];
}

std::string name_of_units(TorchRoot& root, UnitRange units) {
  const std::string& name = root.pipeline().unit(units.first).name;
  return units.first == units.last ? name : name + " to " + root.pipeline().unit(units.last).name;
}

}  // namespace

py::dict counters_of(TorchRoot& root) {
  const Counters& c = root.pipeline().ledger().counters();
  py::dict result;
  result["all_gathers"] = c.all_gathers;
  result["reduce_scatters"] = c.reduce_scatters;
  result["reused_unshards"] = c.reused_unshards;
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
  static const char* const ops[] = {"all_gather", "reduce_scatter"};
  Ledger& ledger = root.pipeline().ledger();
  py::list result;
  for (const CollectiveRecord& record : ledger.log()) {
    result.append(py::make_tuple(ops[static_cast<int>(record.op)], name_of(record.phase),
                                 name_of_units(root, record.units), record.bytes));
  }
  ledger.clear_log();
  return result;
}

py::tuple take_times(TorchRoot& root) {
  Ledger& ledger = root.pipeline().ledger();
  std::vector<IterationTimes> iterations;
  const std::uint64_t lost = ledger.lost_iterations();
  {
    const py::gil_scoped_release no_gil;
    root.synchronize();
    iterations = ledger.take_times();
  }
  py::list result;
  for (const IterationTimes& iteration : iterations) {
    py::list spans;
    for (const TimedSpan& timed : iteration.spans) {
      const WorkSpan& span = timed.span;
      spans.append(py::make_tuple(name_of(span.work), name_of(span.phase), span.units.first,
                                  span.units.last, timed.collective.bytes, timed.begin, timed.end,
                                  timed.issued, timed.refused, timed.possible, timed.lead,
                                  timed.collective.issue.on_demand));
    }
    result.append(py::make_tuple(iteration.number, spans));
  }
  return py::make_tuple(result, lost);
}

}  // namespace fsdp
