// Steps of attached optimizers: Note [updates in backward] in core/reduce/unit_update.h.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/reduce/reducer.h"

namespace fsdp {
namespace {

bool has_sharded_gradients(Unit& unit) {
  for (std::size_t i = 0; i < unit.gradients.count(); ++i) {
    if (unit.port.has_sharded_gradient(i)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void Reducer::check_updates(const Units& units) const {
  for (const Unit* unit : units) {
    const bool is_updated = unit->update != nullptr && unit->gradients.any_used();
    const bool has_more = unit->gradients.any_arrived() || has_any_accumulated(*unit);
    FSDP_CHECK(!is_updated || !has_more, "Unit '", unit->name,
               "' got more gradients after its attached optimizer had stepped it in this backward. "
               "Call step() after backward instead of attaching the optimizer.");
    FSDP_CHECK(unit->update == nullptr || !device_.is_capturing(),
               "A CUDA graph capture got unit '", unit->name,
               "', which has an attached optimizer. Call the optimizer's detach() before "
               "the capture, and its step() in it.");
  }
}

// `reduction.after` is already ordered after all work of the reduction.
void Reducer::update(const Reduction& reduction) {
  const auto is_updated = [](const Unit* unit) { return unit->update != nullptr; };
  if (std::none_of(reduction.units.begin(), reduction.units.end(), is_updated)) {
    return;
  }
  for (Unit* unit : reduction.units) {
    unit->updates.is_awaited = unit->update != nullptr;
    unit->updates.awaits_measure = unit->update != nullptr && unit->update->measures();
  }
  updated_.push_back(&reduction.bucket);
  if (!device_.is_host()) {
    run_updates(reduction.bucket, reduction.units, &reduction.after, /*is_end=*/false);
  }
}

// Before the end of backward, units that miss gradients are left out. `stream` is null on the host.
void Reducer::run_updates(Bucket& bucket, const Units& units, Stream* stream, bool is_end) {
  const bool has_all = is_end || route_of(bucket) == Route::Local;
  const auto record = [&] {
    if (stream != nullptr) {
      stream->record(*bucket.reduction.reduced_);
    }
  };
  const auto timed = [&] {
    return Timed(ledger_, stream == nullptr ? device_.compute_stream() : *stream,
                 stream == nullptr ? Work::Step : Work::Update, bucket.numbers());
  };
  try {
    for (Unit* unit : units) {
      if (std::exchange(unit->updates.awaits_measure, false)) {
        const Timed timing = timed();
        unit->update->measure(stream);
      }
    }
    for (Unit* unit : units) {
      if (unit->updates.is_awaited && (has_all || !unit->gradients.misses_gradients())) {
        unit->updates.count += has_sharded_gradients(*unit) ? 1 : 0;
        const Timed timing = timed();
        unit->update->run(stream);
        unit->updates.is_awaited = false;
      }
    }
  } catch (...) {
    record();  // work that was issued before the error reads gradients, too
    throw;
  }
  record();
}

void Reducer::finish_updates(std::size_t most) {
  while (updated_.size() > most) {
    Bucket& bucket = *updated_.front();
    updated_.erase(updated_.begin());
    BucketReduction& reduction = bucket.reduction;
    if (device_.is_host()) {
      {
        const Timed timed(ledger_, device_.compute_stream(), Work::WaitForReduction,
                          bucket.numbers());
        reduction.reduced_->synchronize(device_.timeout(), reduction.label);
      }
      run_updates(bucket, bucket.units, nullptr, /*is_end=*/false);
    } else if (may_lend_) {
      if (reduction.is_pending_) {
        const Timed timed(ledger_, device_.compute_stream(), Work::WaitForReduction,
                          bucket.numbers());
        wait_for_reduction(bucket);
      }
      if (may_lend(bucket)) {
        lend(bucket);
      }
    }
  }
}

// Also if this backward is not the last, the compute stream waits for all updates. Once a graph has
// captured a step, BackwardSchedule::end_backward does that.
void Reducer::end_updates(const std::vector<std::unique_ptr<Unit>>& units) {
  finish_updates(/*most=*/0);
  for (const auto& unit : units) {
    if (!unit->updates.is_awaited) {
      continue;
    }
    Bucket& bucket = *unit->bucket;
    BucketReduction& reduction = bucket.reduction;
    Stream* stream = nullptr;
    if (!device_.is_host()) {
      stream = sums(route_of(bucket)) ? &replicas_->stream() : &streams_.messages();
      stream->wait(*reduction.reduced_, reduction.label);
      reduction.is_pending_ = true;
    }
    run_updates(bucket, {unit.get()}, stream, /*is_end=*/true);
    if (stream != nullptr) {
      wait_for_reduction(bucket);
    }
  }
}

// After a backward that failed.
void Reducer::discard_updates(const Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->updates.is_awaited) {
      unit->updates.is_awaited = unit->updates.awaits_measure = false;
      unit->port.discard_sharded_gradients();
    }
  }
}

}  // namespace fsdp
