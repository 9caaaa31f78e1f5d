// The memory of the gatherer, which is planned between iterations: core/memory/memory_plan.h.
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
  // Work in flight may still use the buffers of the previous plan. They are freed first, so that
  // old and new buffers never exist together.
  synchronize();
  ring_.reset();
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
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      std::move(memory.ring));
  const std::size_t staging = memory.staging_bytes;
  staging_.reset(staging > 0 ? lane_.allocate(staging, BufferUse::Output) : nullptr, staging);
  for (const auto& bucket : buckets) {
    if (bucket->units.front()->reshard_after_forward &&
        bucket->gather.persistent_slot_ != nullptr && bucket->gather.persistent_slot_->users == 0) {
      bucket->gather.persistent_slot_.reset();
    }
  }
  allocate_persistent_slots(buckets);
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

// A persistent slot is used from the next forward on, so ranks allocate and register it together,
// while they plan memory.
void Gatherer::allocate_persistent_slots(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  for (const auto& bucket : buckets) {
    if (!bucket->use().reshards_after_forward && bucket->buffers.slot > 0 &&
        bucket->gather.persistent_slot_ == nullptr) {
      make_persistent_slot(*bucket, bucket->gather.all_ranks_.communicator.allocate(
                                        device_, bucket->buffers.slot, BufferUse::Output));
    }
  }
}

void Gatherer::make_persistent_slot(Bucket& bucket, std::shared_ptr<void> memory) {
  bucket.gather.persistent_slot_ = std::make_unique<Slot>();
  bucket.gather.persistent_slot_->bytes = bucket.buffers.slot;
  bucket.gather.persistent_slot_->memory = std::move(memory);
  bucket.gather.persistent_slot_->released = device_.new_event();
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

}  // namespace fsdp
