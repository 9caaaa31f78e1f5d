#include "core/ledger.h"

#include <algorithm>

#include "device/host_clock.h"

namespace fsdp {

void Ledger::reset() {
  Counters fresh;
  fresh.unsharded_bytes = fresh.peak_unsharded_bytes = counters_.unsharded_bytes;
  fresh.unsharded_units = fresh.peak_unsharded_units = counters_.unsharded_units;
  counters_ = fresh;
}

void Ledger::collective(Collective op, UnitRange units, std::size_t bytes) {
  (op == Collective::AllGather ? counters_.all_gathers : counters_.reduce_scatters) += 1;
  counters_.wire_bytes += bytes;
  if (logging_) {
    log_.push_back({op, phase_, units.first, units.last, bytes});
  }
}

void Ledger::unsharded(int units, std::size_t bytes) {
  counters_.unsharded_bytes += bytes;
  counters_.unsharded_units += units;
  counters_.peak_unsharded_bytes =
      std::max(counters_.peak_unsharded_bytes, counters_.unsharded_bytes);
  counters_.peak_unsharded_units =
      std::max(counters_.peak_unsharded_units, counters_.unsharded_units);
}

void Ledger::resharded(int units, std::size_t bytes) {
  counters_.unsharded_bytes -= bytes;
  counters_.unsharded_units -= units;
}

// - Times

void Ledger::keep_times(std::size_t iterations) {
  now_ = nullptr;
  iterations_.clear();
  iterations_.resize(iterations);
  for (Iteration& iteration : iterations_) {
    iteration.moments = device_.new_moments();
  }
  lost_ = 0;
}

// What a CUDA graph captures runs when it is replayed, and then writes nothing down.
void Ledger::begin_iteration() {
  now_ = nullptr;
  if (iterations_.empty() || device_.is_capturing()) {
    return;
  }
  now_ = &iterations_[begun_ % iterations_.size()];
  begun_ += 1;
  lost_ += now_->number != 0 ? 1 : 0;
  now_->number = begun_;
  now_->marked = 0;
  now_->spans.clear();
  now_->collectives.clear();
}

std::int32_t Ledger::mark(Stream& stream) {
  now_->moments->mark(static_cast<std::size_t>(now_->marked), stream);
  if (&stream == &device_.compute_stream()) {
    last_of_compute_ = {now_->marked, now_->number};
  }
  return now_->marked++;
}

OpenSpan Ledger::open(Stream& stream, Work work, UnitRange units,
                      const IssuedCollective& collective, bool follows) {
  if (!has_times()) {
    return {};
  }
  const OpenSpan opened = open_at(follows ? now_->marked - 1 : mark(stream), work, units);
  now_->spans.back().collective = static_cast<std::int32_t>(now_->collectives.size());
  now_->collectives.push_back(collective);
  return opened;
}

void Ledger::wait(Stream& compute, Event& event, const std::string& what, Work work,
                  UnitRange units) {
  OpenSpan span = open(compute, work, units);
  if (compute.wait(event, what)) {
    close(span, compute);
  } else if (has_times()) {
    now_->spans.pop_back();
  }
}

std::int32_t Ledger::mark_compute() {
  return has_times() ? mark(device_.compute_stream()) : WorkSpan::kNever;
}

// An iteration that ended in an exception leaves spans open that are never ended.
void Ledger::end_span(OpenSpan& open, Stream& stream) {
  if (has_times() && now_->number == open.iteration) {
    now_->spans[static_cast<std::size_t>(open.number)].end = mark(stream);
  }
  open.number = WorkSpan::kNever;
}

std::vector<IterationTimes> Ledger::take_times() {
  now_ = nullptr;
  std::vector<IterationTimes> result;
  for (Iteration& iteration : iterations_) {
    if (iteration.number == 0) {
      continue;
    }
    const auto seconds = [&iteration](std::int32_t moment) {
      return moment == WorkSpan::kNever
                 ? 0.0
                 : iteration.moments->seconds(static_cast<std::size_t>(moment));
    };
    result.push_back({iteration.number, {}});
    result.back().spans.reserve(iteration.spans.size());
    for (const WorkSpan& span : iteration.spans) {
      IssuedCollective collective;
      if (span.collective != WorkSpan::kNever) {
        collective = iteration.collectives[static_cast<std::size_t>(span.collective)];
      }
      const Issue& issue = collective.issue;
      result.back().spans.push_back({span, collective, seconds(span.begin), seconds(span.end),
                                     seconds(issue.possible), host_clock::seconds(issue.at),
                                     host_clock::seconds(issue.refused)});
    }
    iteration.number = 0;
  }
  std::sort(result.begin(), result.end(),
            [](const IterationTimes& a, const IterationTimes& b) { return a.number < b.number; });
  lost_ = 0;
  return result;
}

}  // namespace fsdp
