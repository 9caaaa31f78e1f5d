#include "core/gather/gatherer.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

const std::string kGatherStream = "the gather stream";
const std::string kReaders = "the reads of all slots";

bool needs_slot(const Bucket& bucket) { return bucket.buffers.slot > 0; }

// The sum changes if the version of any unit does.
std::uint64_t version_of(const Bucket& bucket) {
  std::uint64_t version = 0;
  for (const Unit* unit : bucket.units) {
    version += unit->shard_version();
  }
  return version;
}

}  // namespace

Gatherer::Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announcer& announcer)
    : device_(device),
      packer_(packer),
      lane_(lane),
      streams_(device, lane),
      ledger_(ledger),
      announcer_(announcer),
      staging_(device),
      read_(device.new_event()) {}

// Work in flight uses the buffers that are freed now.
Gatherer::~Gatherer() {
  try {
    wait_for_readers();
  } catch (const std::exception&) {
    // The device has failed, or a kernel of the user does not end. A destructor cannot say so.
  }
  lane_.drain();
}

void Gatherer::synchronize() {
  wait_for_readers();
  lane_.synchronize();
}

// Any stream of the user may read a slot, and its memory may belong to yet another one.
void Gatherer::wait_for_readers() {
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

void Gatherer::begin_iteration(bool goes_on) {
  streams_.follow_compute();
  iteration_ += goes_on ? 0 : 1;
}

bool Gatherer::reshard_outdated(const std::vector<std::unique_ptr<Unit>>& units) {
  bool has_changed = false;
  for (const auto& unit : units) {
    const std::uint64_t version = unit->shard_version();
    has_changed = has_changed || unit->gather.followed_version_ != version;
    unit->gather.followed_version_ = version;
    if (!unit->gather.is_sharded() && !is_current(*unit)) {
      reshard(*unit);
    }
  }
  return has_changed;
}

// A captured graph must end in the stream that its capture began on. Later passes end there, too,
// since a replay may follow them, also one of another model on these lanes: Note [graph capture] in
// device/cuda_stream.cpp.
void Gatherer::join_capture() {
  if (device_.is_capturing()) {
    has_been_captured_ = true;
    lane_.note_capture();
  }
  if (!lane_.has_been_captured()) {
    return;
  }
  Stream& last = streams_.after(streams_.is_any_in_pieces());
  streams_.order_after(last, streams_.messages(), kGatherStream);
  streams_.order_after(device_.compute_stream(), last, kGatherStream);
}

// - Units

// Whether the unsharded parameters match the shards, as far as versions tell.
bool Gatherer::is_current(Unit& unit) const {
  if (unit.layout.is_identity() && unit.port.computes_inputs()) {
    return unit.gather.inputs_version_ == unit.shard_version();
  }
  return unit.layout.is_identity() || unit.layout.unsharded_bytes() == 0 ||
         (unit.bucket->gather.gathered_from_.valid &&
          unit.gather.gathered_version_ == unit.shard_version());
}

bool Gatherer::unshard(Unit& unit, bool on_demand) {
  if (unit.gather.state_ == UnitState::Sharded && !start_unshard(unit, on_demand)) {
    return false;
  }
  unit.gather.is_speculative_ = unit.gather.is_speculative_ && !on_demand;
  return true;
}

bool Gatherer::start_unshard(Unit& unit, bool on_demand) {
  Bucket& bucket = *unit.bucket;
  if (!needs_slot(bucket)) {
    compute_inputs(unit);
    ledger_.counters().add_unsharded_unit();
    ledger_.counters().add_unsharded_bytes(unit.layout.unsharded_bytes());
    unit.gather.state_ = UnitState::Gathering;
    unit.gather.is_speculative_ = true;
    return true;
  }
  const bool is_gathered = bucket.gather.slot_ != nullptr && bucket.gather.gathered_from_.valid &&
                           bucket.gather.gathered_from_.iteration == iteration_;
  if (!is_gathered || unit.gather.gathered_version_ != unit.shard_version()) {
    Slot* slot = reacquire_slot(bucket);
    if (slot != nullptr) {
      ledger_.counters().reused_unshards += 1;
    } else {
      for (Unit* member : bucket.units) {
        compute_inputs(*member);  // first, since a user's function may raise
      }
      slot = acquire_slot(bucket, on_demand);
      note_issue(bucket, slot, on_demand);
      if (slot == nullptr) {
        return false;
      }
      gather_into(bucket, *slot);
    }
    bucket.gather.slot_ = slot;
    ledger_.counters().add_unsharded_bytes(bucket.layout.unsharded_bytes());
  }
  retain_slot(bucket);
  return true;
}

// For the ledger: the issue time and the earliest time it could have been issued.
void Gatherer::note_issue(Bucket& bucket, const Slot* slot, bool on_demand) {
  if (!ledger_.has_times()) {
    return;
  }
  Issue& issue = bucket.gather.issue_;
  if (slot == nullptr) {
    issue.refused = issue.refused != 0 ? issue.refused : host_clock::now();
    return;
  }
  issue.at = host_clock::now();
  issue.possible = ledger_.number_of(slot->released_after);
  issue.on_demand = on_demand;
}

void Gatherer::reset_issues(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  for (const auto& bucket : buckets) {
    bucket->gather.issue_ = {};
  }
}

// A capture begins after all earlier work has ended, so it waits for captured streams only.
template <typename Visit>
void Gatherer::for_each_reader(const Slot& slot, const Visit& visit) {
  const bool is_capturing = device_.is_capturing();
  for (void* const handle : slot.read_on) {
    Stream& stream = device_.stream_of(handle);
    if (!is_capturing || stream.is_capturing()) {
      visit(stream);
    }
  }
}

// All readers wait for the last piece, because each stream may use any unit of the bucket later.
void Gatherer::note_read(Unit& unit) {
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

bool Gatherer::attach(Unit& unit) {
  note_read(unit);
  if (unit.gather.state_ == UnitState::Unsharded) {
    if (unit.gather.is_put_away()) {
      unit.gather.put_away_ = UnitGather::PutAway::No;
      unit.port.show_unsharded();
    }
    return false;
  }
  FSDP_CHECK(unit.gather.state_ == UnitState::Gathering, "Unit '", unit.name,
             "' is not gathered. Call unshard before waiting for it.");
  const bool has_gather = !unit.layout.is_identity() && unit.gather.slot_ != nullptr;
  unit.gather.is_speculative_ = false;
  if (has_gather) {
    unit.bucket->gather.is_unused_ = false;
    wait_for_gather(unit);
    unit.port.attach(static_cast<char*>(unit.gather.slot_->data()) + unit.unsharded_offset);
  } else {
    unit.port.attach(unit.layout.is_identity() ? unit.port.flat_shard() : nullptr);
  }
  unit.gather.state_ = UnitState::Unsharded;
  return has_gather;
}

void Gatherer::reshard(Unit& unit) {
  if (unit.gather.state_ == UnitState::Sharded) {
    return;
  }
  if (unit.gather.state_ == UnitState::Unsharded) {
    unit.port.detach();
  }
  const GatherSource& source = unit.bucket->gather.source();
  const GatherPiece& last = source.last_piece();
  if (unit.gather.slot_ != nullptr && unit.gather.slot_->users == 1 &&
      (unit.gather.state_ == UnitState::Gathering || &source.last_piece(unit) != &last)) {
    // The next gather into the slot starts after all of this one.
    device_.compute_stream().wait(*last.gathered, source.label);
  }
  unit.gather.state_ = UnitState::Sharded;
  unit.gather.is_speculative_ = false;
  unit.gather.put_away_ = UnitGather::PutAway::No;
  unit.gather.is_held_ = false;
  ledger_.counters().remove_unsharded_unit();
  Slot* slot = std::exchange(unit.gather.slot_, nullptr);
  if (slot == nullptr) {
    ledger_.counters().remove_unsharded_bytes(unit.layout.unsharded_bytes());
    return;
  }
  slot->users -= 1;
  if (slot->users == 0) {
    release_slot(*slot, *unit.bucket);
  }
}

void Gatherer::reshard_speculative(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->gather.is_speculative_) {
      reshard(*unit);
    }
  }
}

// - Slots

// See Note [lazy reshard]. What a slot contains of the bucket is of its newest gather, which
// `gathered_from_` describes.
Slot* Gatherer::reacquire_slot(Bucket& bucket) {
  const ShardStamp now{iteration_, version_of(bucket), true};
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

Slot* Gatherer::acquire_slot(Bucket& bucket, bool on_demand) {
  if (!bucket.units.front()->reshard_after_forward) {
    if (Slot* slot = acquire_persistent_slot(bucket)) {
      return slot;
    }
  } else if (Slot* slot = acquire_in_ring(bucket, on_demand)) {
    return slot;
  }
  if (!on_demand) {
    return nullptr;
  }
  ledger_.counters().overflow_slots += 1;
  Slot* slot = ring_->acquire_overflow(bucket.number, bucket.buffers.slot);
  streams_.follow_compute();
  return slot;
}

// On demand, prefetched buckets make room, one after the other.
Slot* Gatherer::acquire_in_ring(const Bucket& bucket, bool on_demand) {
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

// Null while a unit still uses the parameters that an earlier gather put there.
Slot* Gatherer::acquire_persistent_slot(Bucket& bucket) {
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

// Whether all users of the bucket's slot in the ring were prefetched and not used yet.
bool Gatherer::has_reclaimable_slot(const Bucket& bucket) const {
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
void Gatherer::abandon_gather(Bucket& bucket) {
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

// For all units of the bucket that are sharded. These units are speculative until they are used.
void Gatherer::retain_slot(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->gather.state_ == UnitState::Sharded) {
      unit->gather.state_ = UnitState::Gathering;
      unit->gather.is_speculative_ = true;
      unit->gather.slot_ = bucket.gather.slot_;
      bucket.gather.slot_->users += 1;
      ledger_.counters().add_unsharded_unit();
    }
  }
}

// See Note [slot lifetime].
void Gatherer::follow_readers(Slot& slot, const Bucket& bucket) {
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

void Gatherer::count_if_dropped(Bucket& bucket) {
  if (std::exchange(bucket.gather.is_unused_, false)) {
    ledger_.counters().dropped_gathers += 1;
  }
}

void Gatherer::release_slot(Slot& slot, Bucket& bucket) {
  follow_readers(slot, bucket);
  Stream& compute = device_.compute_stream();
  ledger_.counters().remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  slot.released_after = ledger_.last_compute_moment();
  bool keeps_contents =
      bucket.gather.slot_ == &slot;  // else the bucket was gathered again elsewhere
  const bool copies = keeps_contents && keep_group_shard(bucket, slot);
  const GroupShard* const group = bucket.gather.group_.get();
  // An earlier release may have issued a copy, too, before slots were poisoned.
  if (group != nullptr && (poison_ || (copies && slot.is_overflow))) {
    compute.wait(*group->kept, group->source.label);
  }
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

void Gatherer::invalidate(Bucket& bucket) {
  bucket.gather.gathered_from_.valid = false;
  bucket.gather.cast_from_.valid = false;
  if (bucket.gather.group_ != nullptr) {
    bucket.gather.group_->kept_from.valid = false;
  }
  for (Unit* unit : bucket.units) {
    unit->gather.inputs_iteration_ = 0;
  }
  streams_.follow_compute();  // no version tells that the shards have changed
}

// Returns whether the message stream still has to make a copy. A gather that overwrites the slot,
// or reads the kept copy, comes after it on that stream.
bool Gatherer::keep_group_shard(Bucket& bucket, const Slot& slot) {
  GroupShard* group = bucket.gather.group_.get();
  if (group == nullptr || !std::exchange(group->is_due, false) ||
      !bucket.gather.gathered_from_.valid ||
      group->kept_from.matches(bucket.gather.gathered_from_)) {
    return false;
  }
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
  return true;
}

}  // namespace fsdp
