// The pipeline's settings, which are effective from the next use on, and what is asked between
// steps.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "core/pipeline.h"

namespace fsdp {

void Pipeline::set_reshard_after_forward(int number, bool value, int group) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_forward != value || unit.reshard_group != group) {
    unit.reshard_after_forward = value;
    unit.reshard_group = group;
    bucket_set_.invalidate_partition();
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_keeps_slot_after_evaluation(int number, bool value) {
  unit_at(number).keeps_slot_after_evaluation = value;
}

void Pipeline::set_reshard_after_backward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.reshard_after_backward != value) {
    unit.reshard_after_backward = value;
    bucket_set_.invalidate_partition();
  }
}

void Pipeline::set_unshards_in_backward(int number, bool value) {
  Unit& unit = unit_at(number);
  if (unit.unshards_in_backward != value) {
    unit.unshards_in_backward = value;
    bucket_set_.invalidate_partition();
  }
}

void Pipeline::set_requires_gradient_sync(int number, bool value) {
  unit_at(number).requires_gradient_sync = value;
}

void Pipeline::set_reduces_unused(int number, bool value) {
  Unit& unit = unit_at(number);
  unit.reduces_unused = value;
  backward_order_.set_expected(number, value && !unit.arrived.empty());
}

void Pipeline::set_gradient_scales(int number, double pack_scale, double reduce_scale) {
  Unit& unit = unit_at(number);
  if (unit.pack_scale != pack_scale || unit.reduce_scale != reduce_scale) {
    unit.pack_scale = pack_scale;
    unit.reduce_scale = reduce_scale;
    bucket_set_.invalidate_partition();
  }
}

void Pipeline::set_reduce_hook(int number, std::shared_ptr<ReduceHook> hook) {
  Unit& unit = unit_at(number);
  unit.reduce_hook = std::move(hook);
  reduce_alone_with_hooks(unit);
}

void Pipeline::set_communication_hook(int number, std::shared_ptr<ReduceHook> hook) {
  Unit& unit = unit_at(number);
  unit.communication_hook = std::move(hook);
  reduce_alone_with_hooks(unit);
}

void Pipeline::set_gather_hook(int number, std::shared_ptr<ReduceHook> hook) {
  Unit& unit = unit_at(number);
  unit.gather_hook = std::move(hook);
  reduce_alone_with_hooks(unit);
}

void Pipeline::set_scatter_hook(int number, std::shared_ptr<ReduceHook> hook) {
  Unit& unit = unit_at(number);
  unit.scatter_hook = std::move(hook);
  reduce_alone_with_hooks(unit);
}

void Pipeline::reduce_alone_with_hooks(Unit& unit) {
  const bool reduces_alone = unit.reduce_hook != nullptr || unit.communication_hook != nullptr ||
                             unit.gather_hook != nullptr || unit.scatter_hook != nullptr;
  if (unit.reduces_alone != reduces_alone) {
    unit.reduces_alone = reduces_alone;
    bucket_set_.invalidate_partition();
    bucket_set_.invalidate_comparison();
  }
}

void Pipeline::set_forward_prefetch(int number, std::vector<int> targets) {
  Unit& unit = unit_at(number);
  if (unit.forward_prefetch != targets) {
    unit.forward_prefetch = std::move(targets);
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_backward_prefetch(int number, std::vector<int> targets) {
  Unit& unit = unit_at(number);
  if (unit.backward_prefetch != targets) {
    unit.backward_prefetch = std::move(targets);
    bucket_set_.invalidate_memory();
  }
}

void Pipeline::set_bucket_bytes(int number, std::size_t bytes) {
  Unit& unit = unit_at(number);
  if (unit.bucket_bytes != bytes) {
    unit.bucket_bytes = bytes;
    bucket_set_.invalidate_partition();
    bucket_set_.invalidate_comparison();
  }
}

void Pipeline::set_prefetch_depth(int depth) {
  if (options_.prefetch_depth != depth) {
    options_.prefetch_depth = depth;
    bucket_set_.invalidate_memory();
  }
}

// - Measurements and buckets

// The number of moments is an estimate: each unit's forward, backward and waits, and each piece's
// copies and message.
void Pipeline::keep_times(std::size_t iterations, bool drained) {
  constexpr std::size_t kOfAUnit = 12;
  constexpr std::size_t kOfAPiece = 8;
  std::size_t moments = kOfAUnit * (units_.size() + 1);
  for (const auto& bucket : buckets()) {
    moments += kOfAPiece * (bucket->gathers.size() + bucket->reductions.size());
    moments += bucket->group != nullptr ? kOfAPiece * bucket->group->gathers.size() : 0;
  }
  ledger_.keep_times(iterations, moments, drained);
}

void Pipeline::form_buckets() try {
  if (!units_.empty() && units_.front()->bucket == nullptr) {
    bucket_set_.form(forward_order_, reducer_);
  }
} catch (const Error& error) {
  fail(error);
}

void Pipeline::update_buckets() try {
  bucket_set_.update(forward_order_, gatherer_, reducer_);
} catch (const Error& error) {
  fail(error);
}

std::vector<Reducer::AccumulatedPart> Pipeline::accumulated_parts(int number) {
  const Bucket* bucket = unit(number).bucket;
  if (bucket == nullptr || !bucket->has_accumulated) {
    return {};
  }
  bucket->packed->synchronize(device_.timeout(), bucket->reduce_label);
  lanes_.reduce.synchronize();
  return Reducer::accumulated_parts(*bucket, unit(number));
}

std::vector<char> Pipeline::has_accumulated(int number) const {
  const Unit& asked = unit(number);
  std::vector<char> has(asked.arrived.size(), 0);
  for (std::size_t i = 0; asked.bucket != nullptr && i < has.size(); ++i) {
    has[i] = Reducer::has_accumulated(*asked.bucket, asked, i) ? 1 : 0;
  }
  return has;
}

void Pipeline::set_accumulated(int number, const std::vector<char>& has) {
  Unit& unit = unit_at(number);
  FSDP_CHECK(unit.bucket != nullptr && has.size() == unit.arrived.size(), "set_accumulated got ",
             has.size(), " flags. Unit '", unit.name, "' needs ", unit.arrived.size(),
             ", and a bucket.");
  unit.awaits_reduction = true;
  if (std::find(has.begin(), has.end(), 1) == has.end()) {
    return;
  }
  reducer_.begin_accumulating(*unit.bucket);
  for (std::size_t i = 0; i < has.size(); ++i) {
    if (has[i] != 0) {
      reducer_.set_accumulated(*unit.bucket, unit, i);
    }
  }
}

const Bucket& Pipeline::bucket_of(int number) const {
  const Unit& asked = unit(number);
  FSDP_CHECK(asked.bucket != nullptr, "Unit '", asked.name,
             "' has no bucket yet. Call form_buckets() before.");
  return *asked.bucket;
}

}  // namespace fsdp
