#include "core/record/ledger.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "device/host_clock.h"

namespace fsdp {

void Ledger::reset() {
  Counters fresh;
  fresh.unsharded_bytes = fresh.peak_unsharded_bytes = counters_.unsharded_bytes;
  fresh.unsharded_units = fresh.peak_unsharded_units = counters_.unsharded_units;
  counters_ = fresh;
}

void Ledger::count_collective(Collective op, UnitRange units, std::size_t bytes) {
  (op == Collective::AllGather       ? counters_.all_gathers
   : op == Collective::ReduceScatter ? counters_.reduce_scatters
   : op == Collective::AllReduce     ? counters_.all_reduces
                                     : counters_.group_all_gathers) += 1;
  counters_.wire_bytes += bytes;
  if (logging_) {
    log_.push_back({op, phase_, units, bytes});
  }
}

// - Times

void Ledger::keep_times(std::size_t iterations, std::size_t moments, bool drained) {
  now_ = nullptr;
  if (!drained) {
    std::move(iterations_.begin(), iterations_.end(), std::back_inserter(retired_));
  }
  iterations_.clear();
  iterations_.resize(iterations);
  for (Iteration& iteration : iterations_) {
    iteration.moments = device_.new_moments();
    iteration.moments->reserve(moments);
  }
  begun_before_ = begun_;
  lost_ = 0;
}

// A captured CUDA graph runs later, at its replay, which records no times.
void Ledger::begin_iteration() {
  now_ = nullptr;
  if (iterations_.empty() || device_.is_capturing()) {
    return;
  }
  now_ = &iterations_[(begun_ - begun_before_) % iterations_.size()];
  begun_ += 1;
  lost_ += now_->number != 0 ? 1 : 0;
  now_->number = begun_;
  now_->marked = 0;
  now_->spans.clear();
  now_->collectives.clear();
}

std::int32_t Ledger::mark(Stream& stream) {
  now_->moments->mark(static_cast<std::size_t>(now_->marked), stream);
  if (&stream == &compute_) {
    last_compute_moment_ = {now_->marked, now_->number};
  }
  return now_->marked++;
}

IterationIndex Ledger::open(Stream& stream, Work work, UnitRange units,
                            const IssuedCollective& collective, bool follows) {
  if (!has_times()) {
    return {};
  }
  const IterationIndex opened = open_at(follows ? now_->marked - 1 : mark(stream), work, units);
  now_->spans.back().collective = static_cast<std::int32_t>(now_->collectives.size());
  now_->collectives.push_back(collective);
  return opened;
}

void Ledger::open_unit(IterationIndex& span, Work work, int unit, bool has_waited) {
  if (!has_times()) {
    return;
  }
  close(span, compute_);
  const std::int32_t begin = has_waited ? number_of(last_compute_moment()) : mark_compute();
  span = open_at(begin, work, {unit, unit});
}

void Ledger::wait(Event& event, const std::string& what, Work work, UnitRange units) {
  if (!has_times()) {
    compute_.wait(event, what);
    return;
  }
  const std::int32_t begin = now_->marked;
  now_->moments->mark(static_cast<std::size_t>(begin), compute_);
  if (compute_.wait(event, what)) {  // otherwise the next mark takes this number
    now_->marked += 1;
    IterationIndex span = open_at(begin, work, units);
    close(span, compute_);
  }
}

std::int32_t Ledger::mark_compute() { return has_times() ? mark(compute_) : WorkSpan::kNever; }

void Ledger::begin_step() {
  if (number_of(step_) != WorkSpan::kNever) {
    inner_steps_ += 1;
    return;
  }
  inner_steps_ = 0;
  const bool is_recorded = !device_.is_capturing() && mark_compute() != WorkSpan::kNever;
  step_ = is_recorded ? last_compute_moment_ : IterationIndex{};
}

void Ledger::end_step() {
  if (inner_steps_ > 0) {
    inner_steps_ -= 1;
    return;
  }
  const std::int32_t begin = number_of(std::exchange(step_, {}));
  if (begin != WorkSpan::kNever && !device_.is_capturing()) {
    IterationIndex span = open_at(begin, Work::Step, kAllUnits);
    close(span, compute_);
  }
}

// Spans that an exception left open belong to an earlier iteration and are never ended.
void Ledger::end_span(IterationIndex& open, Stream& stream) {
  if (has_times() && now_->number == open.iteration) {
    now_->spans[static_cast<std::size_t>(open.number)].end = mark(stream);
  }
  open.number = WorkSpan::kNever;
}

// Goes from the newest iteration to the oldest: Note [two clocks] in device/cuda_stream.cpp.
std::vector<IterationTimes> Ledger::take_times() {
  now_ = nullptr;
  std::vector<const Iteration*> kept;
  for (const Iteration& iteration : iterations_) {
    if (iteration.number != 0) {
      kept.push_back(&iteration);
    }
  }
  std::sort(kept.begin(), kept.end(),
            [](const Iteration* a, const Iteration* b) { return a->number < b->number; });
  const std::unique_ptr<Moments> anchor = device_.new_moments();
  const Moments* later = anchor.get();
  double at = kept.empty() ? 0.0 : anchor->anchor();
  std::vector<IterationTimes> result(kept.size());
  for (std::size_t i = kept.size(); i-- > 0;) {
    at -= kept[i]->moments->seconds_to(0, *later, 0);
    later = kept[i]->moments.get();
    result[i] = times_of(*kept[i], at);
  }
  for (Iteration& iteration : iterations_) {
    iteration.number = 0;
  }
  lost_ = 0;
  return result;
}

// `begin` is the time of the iteration's first moment.
IterationTimes Ledger::times_of(const Iteration& iteration, double begin) const {
  const Moments& moments = *iteration.moments;
  const auto seconds = [&](std::int32_t moment) {
    return moment == WorkSpan::kNever
               ? 0.0
               : begin + moments.seconds_to(0, moments, static_cast<std::size_t>(moment));
  };
  IterationTimes result{iteration.number - begun_before_, {}};
  result.spans.reserve(iteration.spans.size());
  for (const WorkSpan& span : iteration.spans) {
    IssuedCollective collective;
    if (span.collective != WorkSpan::kNever) {
      collective = iteration.collectives[static_cast<std::size_t>(span.collective)];
    }
    const Issue& issue = collective.issue;
    const double began = seconds(span.begin);
    result.spans.push_back({span, collective, began, seconds(span.end), seconds(issue.possible),
                            host_clock::seconds(issue.at), host_clock::seconds(issue.refused),
                            moments.lead(static_cast<std::size_t>(span.begin), began)});
  }
  return result;
}

}  // namespace fsdp
