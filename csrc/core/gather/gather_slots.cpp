#include "core/gather/gather_slots.h"

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp {
namespace {

const std::string kReaders = "the reads of all slots";

// The sum changes if the version of any unit does.
std::uint64_t version_of(const Bucket& bucket) {
  std::uint64_t version = 0;
  for (const Unit* unit : bucket.units) {
    version += unit->shard_version();
  }
  return version;
}

}  // namespace

GatherSlots::GatherSlots(Device& device, Lane& lane, LaneStreams& streams, Ledger& ledger)
    : device_(device), lane_(lane), streams_(streams), ledger_(ledger), read_(device.new_event()) {}

void GatherSlots::plan(const std::vector<std::unique_ptr<Bucket>>& buckets, RingPlan ring) {
  ring_.reset();
  buckets_ = &buckets;
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      std::move(ring));
  for (const auto& bucket : buckets) {
    if (bucket->units.front()->reshard_after_forward &&
        bucket->gather.persistent_slot_ != nullptr && bucket->gather.persistent_slot_->users == 0) {
      bucket->gather.persistent_slot_.reset();
    }
  }
  allocate_persistent_slots(buckets);
}

// A persistent slot is used from the next forward on, so ranks allocate and register it together,
// while they plan memory.
void GatherSlots::allocate_persistent_slots(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  for (const auto& bucket : buckets) {
    if (!bucket->use().reshards_after_forward && bucket->buffers.slot > 0 &&
        bucket->gather.persistent_slot_ == nullptr) {
      make_persistent_slot(*bucket, bucket->gather.all_ranks_.communicator.allocate(
                                        device_, bucket->buffers.slot, BufferUse::Output));
    }
  }
}

void GatherSlots::make_persistent_slot(Bucket& bucket, std::shared_ptr<void> memory) {
  bucket.gather.persistent_slot_ = std::make_unique<Slot>();
  bucket.gather.persistent_slot_->bytes = bucket.buffers.slot;
  bucket.gather.persistent_slot_->memory = std::move(memory);
  bucket.gather.persistent_slot_->released = device_.new_event();
}

// A capture begins after all earlier work has ended, so it waits for captured streams only.
template <typename Visit>
void GatherSlots::for_each_reader(const Slot& slot, const Visit& visit) {
  const bool is_capturing = device_.is_capturing();
  for (void* const handle : slot.read_on) {
    Stream& stream = device_.stream_of(handle);
    if (!is_capturing || stream.is_capturing()) {
      visit(stream);
    }
  }
}

// Any stream of the user may read a slot, and its memory may belong to yet another one.
void GatherSlots::wait_for_readers() {
  const auto wait = [this](const Slot& slot) {
    slot.released->synchronize(device_.timeout(), kReaders);
    for_each_reader(slot, [this](Stream& stream) {
      stream.record(*read_);
      read_->synchronize(device_.timeout(), kReaders);
    });
  };
  if (ring_ == nullptr) {
    return;
  }
  ring_->for_each_slot(wait);
  for (const auto& bucket : *buckets_) {
    if (bucket->gather.persistent_slot_ != nullptr) {
      wait(*bucket->gather.persistent_slot_);
    }
  }
}

// All readers wait for the last piece, because each stream may use any unit of the bucket later.
void GatherSlots::note_read(const Unit& unit) {
  Slot* const slot = unit.gather.slot_;
  if (slot == nullptr || !note_stream(slot->read_on, device_.compute_stream()) ||
      slot->read_on.size() == 1) {
    return;
  }
  const GatherSource& source = unit.bucket->gather.source();
  for_each_reader(*slot, [&source](Stream& stream) {
    const GatherPiece& last = source.last_piece();
    stream.wait(*last.gathered, source.label);
  });
}

// See Note [lazy reshard]. The slot's contents come from the bucket's newest gather, which
// `gathered_from_` describes.
Slot* GatherSlots::reacquire(Bucket& bucket, std::uint64_t iteration) {
  const ShardStamp now{iteration, version_of(bucket), true};
  if (bucket.gather.slot_ != nullptr || !bucket.gather.gathered_from_.matches(now)) {
    return nullptr;
  }
  if (bucket.gather.persistent_slot_ != nullptr) {
    const bool is_whole = bucket.gather.persistent_slot_->contents == bucket.number &&
                          bucket.gather.persistent_slot_->users == 0;
    return is_whole ? bucket.gather.persistent_slot_.get() : nullptr;
  }
  return ring_->reacquire(bucket.number);
}

Slot* GatherSlots::acquire(Bucket& bucket, bool on_demand) {
  Slot* slot = bucket.units.front()->reshard_after_forward ? acquire_in_ring(bucket, on_demand)
                                                           : acquire_persistent_slot(bucket);
  if (slot == nullptr && on_demand) {
    ledger_.counters().overflow_slots += 1;
    slot = ring_->acquire_overflow(bucket.number, bucket.buffers.slot);
    streams_.follow_compute();
  }
  Slot* const persistent = bucket.gather.persistent_slot_.get();
  if (slot != nullptr && persistent != nullptr && slot != persistent) {
    persistent->contents = Slot::kNobody;  // out of date
  }
  return slot;
}

// On demand, prefetched buckets make room, one after the other.
Slot* GatherSlots::acquire_in_ring(const Bucket& bucket, bool on_demand) {
  const auto acquire = [&] {
    return ring_->try_acquire(bucket.number, bucket.buffers.slot, streams_.messages(),
                              bucket.gather.all_ranks_.label);
  };
  Slot* slot = acquire();
  if (!on_demand || bucket.buffers.slot > ring_->plan().bytes) {
    return slot;
  }
  for (auto other = buckets_->begin(); slot == nullptr && other != buckets_->end(); ++other) {
    if (has_reclaimable_slot(**other)) {
      abandon_gather(**other);
      slot = acquire();
    }
  }
  return slot;
}

// Whether all users of the bucket's slot in the ring were prefetched and not used yet.
bool GatherSlots::has_reclaimable_slot(const Bucket& bucket) {
  const Slot* slot = bucket.gather.slot_;
  if (slot == nullptr || slot == bucket.gather.persistent_slot_.get() || slot->is_overflow) {
    return false;
  }
  const auto speculative =
      std::count_if(bucket.units.begin(), bucket.units.end(), [slot](const Unit* unit) {
        return unit->gather.is_speculative_ && unit->gather.slot_ == slot;
      });
  return speculative == slot->users;
}

// The next gather into the slot starts after this one, and after reads of the compute stream by
// units that were resharded before.
void GatherSlots::abandon_gather(Bucket& bucket) {
  Slot& slot = *bucket.gather.slot_;
  for (Unit* unit : bucket.units) {
    if (unit->gather.slot_ == &slot) {
      unit->gather.slot_ = nullptr;
      unit->gather.state_ = UnitState::Sharded;
      unit->gather.is_speculative_ = false;
      ledger_.counters().remove_unsharded_unit();
    }
  }
  bucket.gather.slot_ = nullptr;
  ledger_.counters().remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  if (bucket.gather.is_in_pieces()) {
    const GatherSource& source = bucket.gather.source();
    streams_.messages().wait(*source.last_piece().gathered, source.label);
  }
  slot.users = 0;
  count_if_dropped(bucket);
  follow_readers(slot, bucket);
  ring_->release(slot, device_.compute_stream(), /*keeps_contents=*/false);
}

// Null while a unit still uses the parameters that an earlier gather put there.
Slot* GatherSlots::acquire_persistent_slot(Bucket& bucket) {
  if (bucket.gather.persistent_slot_ == nullptr) {
    make_persistent_slot(bucket, bucket.gather.all_ranks_.communicator.allocate_alone(
                                     device_, bucket.buffers.slot, BufferUse::Output));
    streams_.follow_compute();
  }
  if (bucket.gather.persistent_slot_->users > 0) {
    return nullptr;
  }
  streams_.messages().wait(*bucket.gather.persistent_slot_->released,
                           bucket.gather.all_ranks_.label);  // Note [slot lifetime]
  bucket.gather.persistent_slot_->contents = bucket.number;
  return bucket.gather.persistent_slot_.get();
}

// See Note [slot lifetime].
void GatherSlots::follow_readers(Slot& slot, const Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  const bool is_only_reader =
      slot.read_on.size() == 1 && slot.read_on.front() == compute.native_handle();
  if (!is_only_reader) {
    for_each_reader(slot, [&](Stream& stream) {
      if (stream.native_handle() != compute.native_handle()) {
        streams_.order_after(compute, stream, bucket.gather.source().label);
      }
    });
  }
  slot.read_on.clear();
}

void GatherSlots::count_if_dropped(Bucket& bucket) {
  if (std::exchange(bucket.gather.is_unused_, false)) {
    ledger_.counters().dropped_gathers += 1;
  }
}

void GatherSlots::release(Slot& slot, Bucket& bucket) {
  follow_readers(slot, bucket);
  Stream& compute = device_.compute_stream();
  ledger_.counters().remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  slot.released_after = ledger_.last_compute_moment();
  bool keeps_contents =
      bucket.gather.slot_ == &slot;  // else the bucket was gathered again elsewhere
  if (keeps_contents) {
    count_if_dropped(bucket);
    bucket.gather.slot_ = nullptr;
  }
  if (poison_) {
    device_.fill(compute, slot.data(), 0xff, slot.bytes);  // a NaN in every floating dtype
    bucket.gather.gathered_from_.valid = bucket.gather.gathered_from_.valid && !keeps_contents;
    keeps_contents = false;
  }
  if (&slot == bucket.gather.persistent_slot_.get()) {
    compute.record(*slot.released);
    slot.contents = keeps_contents ? bucket.number : Slot::kNobody;
  } else {
    ring_->release(slot, compute, keeps_contents);
  }
}

}  // namespace fsdp
