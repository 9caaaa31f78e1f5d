// Steps of optimizers in backward: Note [updates in backward] in core/reduce/user_collective.h.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/reduce/reducer.h"
#include "core/reduce/user_collective.h"

namespace fsdp {

void Reducer::begin_updates(const Units& units) {
  for (const Unit* unit : units) {
    FSDP_CHECK(unit->update == nullptr || !unit->gradients.is_reduced(), "Unit '", unit->name,
               "' got gradients in two parts in one backward, but its attached optimizer has "
               "stepped with the first part. Call step() after backward instead of attaching it.");
  }
  finish_updates(/*most=*/1);
}

// The stream of the reduction is ordered after all of its work.
void Reducer::update(const Reduction& reduction) {
  const Units& units = reduction.units;
  if (std::all_of(units.begin(), units.end(),
                  [](const Unit* unit) { return unit->update == nullptr; })) {
    return;
  }
  for (Unit* unit : units) {
    unit->gradients.awaits_update_ = true;
    if (!device_.is_host()) {
      run_update(*unit, &reduction.after);
    }
  }
  updated_.push_back(&reduction.bucket);
}

void Reducer::run_update(Unit& unit, Stream* stream) {
  if (unit.update != nullptr && std::exchange(unit.gradients.awaits_update_, false)) {
    unit.gradients.updates_ += 1;
    unit.update->run(stream);
  }
}

void Reducer::finish_updates(std::size_t most) {
  while (updated_.size() > most) {
    Bucket& bucket = *updated_.front();
    updated_.erase(updated_.begin());
    if (device_.is_host()) {
      bucket.reduction.reduced_->synchronize(device_.timeout(), bucket.reduction.label);
      for (Unit* unit : bucket.units) {
        run_update(*unit, nullptr);
      }
    } else if (!device_.is_capturing()) {
      wait_for_reduction(bucket);
      if (may_lend(bucket)) {
        lend(bucket);
      }
    }
  }
}

void Reducer::end_updates(const std::vector<std::unique_ptr<Unit>>& units) {
  for (const auto& unit : units) {
    if (unit->update == nullptr || !unit->gradients.awaits_update_) {
      continue;
    }
    Bucket& bucket = *unit->bucket;
    if (!device_.is_host()) {
      Stream& stream = sums(route_of(bucket)) ? replicas_->stream() : streams_.messages();
      stream.wait(*bucket.reduction.reduced_, bucket.reduction.label);
      run_update(*unit, &stream);
      stream.record(*bucket.reduction.reduced_);
      bucket.reduction.is_pending_ = true;
    }
    if (std::find(updated_.begin(), updated_.end(), &bucket) == updated_.end()) {
      updated_.push_back(&bucket);
    }
  }
  finish_updates(/*most=*/0);
}

}  // namespace fsdp
