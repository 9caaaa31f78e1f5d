// The memory of the gatherer: buffers that are planned between iterations
// (core/memory/memory_plan.h), and group shards.
#include <algorithm>
#include <utility>

#include "base/align.h"
#include "core/gather/gatherer.h"

namespace fsdp {

void Gatherer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots,
                           const BucketSets& together, bool keeps_inputs) {
  const bool may_differ = has_several_meshes(buckets);
  const std::vector<BucketUse> uses = uses_of(buckets);
  // Ranks allocate inputs together, so none keeps them if one does not.
  keeps_inputs = lane_.most(keeps_inputs ? 0 : 1, /*may_differ=*/true) == 0;
  GatherMemory memory =
      plan_gathers(uses, slots, may_differ ? BucketSets{} : together, keeps_inputs);
  memory.any_in_pieces = lane_.most(memory.any_in_pieces ? 1 : 0, may_differ) > 0;
  // Work in flight may still use the buffers of the previous plan. They are freed first, as the
  // ring is in GatherSlots::plan, so that old and new buffers never exist together.
  synchronize();
  staging_.reset(nullptr, 0);
  if (may_differ) {
    memory.ring =
        equal_slots(static_cast<int>(lane_.most(static_cast<std::size_t>(memory.ring.slots), true)),
                    lane_.most(memory.ring.slot_bytes, true));
  }
  memory.staging_bytes = lane_.most(memory.staging_bytes, may_differ);
  streams_.set_any_in_pieces(memory.any_in_pieces);
  buckets_ = &buckets;
  is_any_offloaded_ = std::any_of(buckets.begin(), buckets.end(),
                                  [](const auto& bucket) { return bucket->layout.is_offloaded(); });
  slots_.plan(buckets, std::move(memory.ring));
  const std::size_t staging = memory.staging_bytes;
  staging_.reset(staging > 0 ? lane_.allocate(staging, BufferUse::Output) : nullptr, staging);
  allocate_group_shards(buckets);
  allocate_gather_inputs(buckets, memory, may_differ);
  place_shards(buckets);
  streams_.follow_compute();  // Note [memory and the compute stream]
}

// See Note [shards and gradients in windows].
void Gatherer::place_shards(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::vector<Lane::Movable> shards;
  for (const auto& bucket : buckets) {
    if (bucket->mesh == nullptr && !bucket->layout.needs_cast() && bucket->shard_bytes() > 0) {
      shards.push_back({bucket->flat_shard(), bucket->shard_bytes(),
                        [&bucket = *bucket](auto memory) { bucket.move_shards(memory); }});
    }
  }
  lane_.place_in_windows(shards, BufferUse::Shard);
}

// One allocation for all buckets, because each allocation is registered by itself. See Note [gather
// inputs].
void Gatherer::allocate_gather_inputs(const std::vector<std::unique_ptr<Bucket>>& buckets,
                                      const GatherMemory& memory, bool may_differ) {
  keeps_inputs_ = memory.keeps_inputs;
  if (!keeps_inputs_) {
    for (const auto& bucket : buckets) {
      bucket->gather.input_.reset();
    }
    return;
  }
  const bool lacks_one = std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) {
    return bucket->buffers.gather_input > 0 && bucket->gather.input_ == nullptr;
  });
  if (lane_.most(lacks_one ? 1 : 0, may_differ) == 0) {
    return;
  }
  const std::size_t bytes = lane_.most(memory.kept_input_bytes, may_differ);
  const std::shared_ptr<void> all = lane_.allocate(bytes, BufferUse::Input);
  auto* next = static_cast<char*>(all.get());
  for (const auto& bucket : buckets) {
    if (bucket->buffers.gather_input > 0) {
      bucket->gather.input_ = std::shared_ptr<void>(all, next);
      bucket->gather.cast_from_ = {};
      next += align_up(bucket->buffers.gather_input, kRegionAlignment);
    }
  }
}

// One allocation for all buckets of a group, as for gather inputs.
void Gatherer::allocate_group_shards(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  for (const auto& first : buckets) {
    Communicator* group =
        first->gather.group_ != nullptr ? &first->gather.group_->source.communicator : nullptr;
    if (group == nullptr || first->gather.group_->memory != nullptr) {
      continue;
    }
    const auto each = [&buckets, group](const auto& visit) {
      for (const auto& bucket : buckets) {
        if (bucket->gather.group_ != nullptr &&
            &bucket->gather.group_->source.communicator == group) {
          visit(*bucket);
        }
      }
    };
    std::size_t bytes = 0;
    each([&bytes](Bucket& bucket) {
      bytes += align_up(bucket.buffers.group_shard, kRegionAlignment);
    });
    const std::shared_ptr<void> memory = group->allocate(device_, bytes, BufferUse::Input);
    auto* next = static_cast<char*>(memory.get());
    each([&](Bucket& bucket) {
      bucket.gather.group_->memory = std::shared_ptr<void>(memory, next);
      bucket.gather.group_->kept_from = {};
      next += align_up(bucket.buffers.group_shard, kRegionAlignment);
    });
  }
}

// - Group shards

void Gatherer::keep_for_backward(Unit& unit) {
  if (unit.bucket->gather.group_ != nullptr) {
    unit.bucket->gather.group_->is_due = true;
  }
}

template <typename Visit>
void Gatherer::for_each_group_shard(const Visit& visit) {
  if (buckets_ == nullptr) {
    return;
  }
  for (const auto& bucket : *buckets_) {
    if (bucket->gather.group_ != nullptr) {
      visit(*bucket->gather.group_);
    }
  }
}

void Gatherer::end_keeping() {
  for_each_group_shard([](GroupShard& group) { group.is_due = false; });
}

void Gatherer::invalidate_group_shards() {
  for_each_group_shard([](GroupShard& group) {
    group.kept_from.valid = false;
    group.is_due = false;
  });
}

// A gather that overwrites the slot, or reads the kept copy, comes after the copy on the stream of
// the messages.
void Gatherer::keep_group_shard(Bucket& bucket, const Slot& slot) {
  GroupShard* group = bucket.gather.group_.get();
  if (group == nullptr) {
    return;
  }
  const bool copies = bucket.gather.slot_ == &slot && std::exchange(group->is_due, false) &&
                      bucket.gather.gathered_from_.valid &&
                      !group->kept_from.matches(bucket.gather.gathered_from_);
  if (copies) {
    Stream& stream = streams_.messages();
    if (bucket.gather.is_in_pieces()) {
      stream.wait(*bucket.gather.source().last_piece().gathered, bucket.gather.source().label);
    }
    {
      const Timed timed(ledger_, stream, Work::Keep, bucket.numbers());
      packer_.unpack(stream, group->keep_plan, slot.data(), group->memory.get());
    }
    ledger_.counters().copied_bytes += 2 * group->layout.gather_bytes();
    stream.record(*group->kept);
    group->kept_from = bucket.gather.gathered_from_;
  }
  // An earlier release may have issued a copy, too, before slots were poisoned.
  if (slots_.poisons_released() || (copies && slot.is_overflow)) {
    device_.compute_stream().wait(*group->kept, group->source.label);
  }
}

}  // namespace fsdp
