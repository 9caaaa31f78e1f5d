#include "core/gatherer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

const std::string kGatherStream = "the gather stream";

bool needs_slot(const Bucket& bucket) { return bucket.buffers.slot > 0; }

// The sum changes if the version of any unit does.
std::uint64_t version_of(const Bucket& bucket) {
  std::uint64_t version = 0;
  for (const Unit* unit : bucket.units) {
    version += unit->port.shard_version();
  }
  return version;
}

const char* message_input(const Bucket& bucket) {
  return static_cast<const char*>(bucket.layout.needs_cast() ? bucket.gather_input.get()
                                                             : bucket.flat_shard());
}

}  // namespace

Gatherer::Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce)
    : device_(device),
      packer_(packer),
      lane_(lane),
      streams_(device, lane),
      ledger_(ledger),
      announce_(std::move(announce)),
      staging_(device) {}

// Work in flight uses the buffers that are freed now.
Gatherer::~Gatherer() { lane_.drain(); }

void Gatherer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots) {
  const GatherMemory memory = plan_gathers(uses_of(buckets), slots);
  // Work in flight may still use the buffers of the plan before.
  lane_.synchronize();
  streams_.set_any_in_pieces(memory.any_in_pieces);
  buckets_ = &buckets;
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      memory.slots, memory.slot_bytes);
  const std::size_t staging = memory.staging_bytes;
  staging_.reset(staging > 0 ? lane_.allocate(staging, BufferUse::Output) : nullptr, staging);
  streams_.follow_compute();  // Note [memory and the compute stream]
  for (const auto& bucket : buckets) {
    if (bucket->units.front()->reshard_after_forward && bucket->home != nullptr &&
        bucket->home->users == 0) {
      bucket->home.reset();
    }
  }
}

void Gatherer::begin_iteration() {
  iteration_ += 1;
  streams_.follow_compute();
  if (ring_ != nullptr) {
    ring_->forget_contents();
  }
}

// A captured graph must end in the stream that its capture began on.
void Gatherer::join_capture() {
  if (!device_.is_capturing()) {
    return;
  }
  Stream& last = streams_.after(streams_.is_any_in_pieces());
  streams_.order_after(last, streams_.messages(), kGatherStream);
  streams_.order_after(device_.compute_stream(), last, kGatherStream);
}

// - Units

bool Gatherer::is_current(Unit& unit) {
  return unit.layout.is_identity() || unit.layout.unsharded_bytes() == 0 ||
         (unit.bucket->gathered_from.valid && unit.gathered_version == unit.port.shard_version());
}

bool Gatherer::unshard(Unit& unit, bool on_demand) {
  if (unit.state == UnitState::Sharded && !start_unshard(unit, on_demand)) {
    return false;
  }
  unit.is_speculative = unit.is_speculative && !on_demand;
  return true;
}

bool Gatherer::start_unshard(Unit& unit, bool on_demand) {
  Bucket& bucket = *unit.bucket;
  if (!needs_slot(bucket)) {
    ledger_.add_unsharded_unit();
    ledger_.add_unsharded_bytes(unit.layout.unsharded_bytes());
    unit.state = UnitState::Gathering;
    unit.is_speculative = true;
    return true;
  }
  const bool is_gathered = bucket.slot != nullptr && bucket.gathered_from.valid &&
                           bucket.gathered_from.iteration == iteration_;
  if (!is_gathered || unit.gathered_version != unit.port.shard_version()) {
    Slot* slot = reacquire_slot(bucket);
    if (slot != nullptr) {
      ledger_.count_reused_unshard();
    } else {
      slot = acquire_slot(bucket, on_demand);
      record_issue(bucket, slot, on_demand);
      if (slot == nullptr) {
        return false;
      }
      gather_into(bucket, *slot);
    }
    bucket.slot = slot;
    ledger_.add_unsharded_bytes(bucket.layout.unsharded_bytes());
  }
  retain_slot(bucket);
  return true;
}

// For the ledger: the issue time and the earliest time it could have been issued.
void Gatherer::record_issue(Bucket& bucket, const Slot* slot, bool on_demand) {
  if (!ledger_.has_times()) {
    return;
  }
  Issue& issue = bucket.gather_issue;
  if (slot == nullptr) {
    issue.refused = issue.refused != 0 ? issue.refused : host_clock::now();
    return;
  }
  issue.at = host_clock::now();
  issue.possible = ledger_.number_of(slot->released_after);
  issue.on_demand = on_demand;
}

bool Gatherer::attach(Unit& unit) {
  if (unit.state == UnitState::Unsharded) {
    if (unit.is_put_away) {
      unit.is_put_away = false;
      unit.port.show_unsharded();
    }
    return false;
  }
  FSDP_CHECK(unit.state == UnitState::Gathering, "Unit '", unit.name,
             "' is not gathered. Call unshard before waiting for it.");
  const bool has_gather = !unit.layout.is_identity() && unit.slot != nullptr;
  unit.is_speculative = false;
  if (has_gather) {
    wait_for_gather(unit);
    unit.port.attach(static_cast<char*>(unit.slot->data()) + unit.unsharded_offset);
  } else {
    unit.port.attach(unit.layout.is_identity() ? unit.port.flat_shard() : nullptr);
  }
  unit.state = UnitState::Unsharded;
  return has_gather;
}

void Gatherer::reshard(Unit& unit) {
  if (unit.state == UnitState::Sharded) {
    return;
  }
  if (unit.state == UnitState::Unsharded) {
    unit.port.detach();
  }
  const std::vector<GatherPiece>& gathers = unit.bucket->gathers;
  if (unit.slot != nullptr && unit.slot->users == 1 &&
      (unit.state == UnitState::Gathering || unit.last_piece + 1 < gathers.size())) {
    // The next gather into the slot starts after all of this one.
    device_.compute_stream().wait(*gathers.back().gathered, unit.bucket->gather_label);
  }
  unit.state = UnitState::Sharded;
  unit.is_speculative = false;
  unit.is_put_away = false;
  unit.is_held = false;
  ledger_.remove_unsharded_unit();
  Slot* slot = std::exchange(unit.slot, nullptr);
  if (slot == nullptr) {
    ledger_.remove_unsharded_bytes(unit.layout.unsharded_bytes());
    return;
  }
  slot->users -= 1;
  if (slot->users == 0) {
    release_slot(*slot, *unit.bucket);
  }
}

void Gatherer::reshard_speculative(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->is_speculative) {
      reshard(*unit);
    }
  }
}

// - Slots

// See Note [lazy reshard].
Slot* Gatherer::reacquire_slot(Bucket& bucket) {
  const ShardStamp now{iteration_, version_of(bucket), true};
  if (bucket.slot != nullptr || !bucket.gathered_from.matches(now)) {
    return nullptr;
  }
  if (bucket.home != nullptr) {
    const bool is_whole = bucket.home->contents == bucket.number && bucket.home->users == 0;
    return is_whole ? bucket.home.get() : nullptr;
  }
  Slot* slot = ring_->find_contents(bucket.number);
  if (slot != nullptr) {
    ring_->reacquire(*slot, bucket.number);
  }
  return slot;
}

Slot* Gatherer::acquire_slot(Bucket& bucket, bool on_demand) {
  const std::size_t bytes = bucket.layout.unsharded_bytes();
  if (!bucket.units.front()->reshard_after_forward) {
    if (Slot* home = acquire_home(bucket)) {
      return home;
    }
  } else if (bytes <= ring_->slot_bytes()) {
    if (Slot* slot = ring_->try_acquire(bucket.number)) {
      return slot;
    }
    if (Slot* slot = on_demand ? reclaim_speculative_slot(bucket.number) : nullptr) {
      return slot;
    }
  }
  if (!on_demand) {
    return nullptr;
  }
  ledger_.count_overflow_slot();
  Slot* slot = ring_->acquire_overflow(bucket.number, bytes);
  streams_.follow_compute();
  return slot;
}

// Null while a unit still uses the parameters that were gathered there before.
Slot* Gatherer::acquire_home(Bucket& bucket) {
  if (bucket.home == nullptr) {
    bucket.home = std::make_unique<Slot>();
    bucket.home->bytes = bucket.buffers.slot;
    bucket.home->memory = lane_.allocate(bucket.home->bytes, BufferUse::Output);
    bucket.home->released = device_.new_event();
    streams_.follow_compute();
  }
  if (bucket.home->users > 0) {
    return nullptr;
  }
  bucket.home->contents = bucket.number;
  return bucket.home.get();
}

Slot* Gatherer::reclaim_speculative_slot(int bucket) {
  for (const auto& other : *buckets_) {
    if (has_reclaimable_slot(*other)) {
      Slot* slot = other->slot;
      abandon_gather(*other);
      slot->owner = slot->contents = bucket;
      return slot;
    }
  }
  return nullptr;
}

// Whether all users of the bucket's slot in the ring were prefetched and not used yet.
bool Gatherer::has_reclaimable_slot(const Bucket& bucket) const {
  const Slot* slot = bucket.slot;
  if (slot == nullptr || slot == bucket.home.get() || slot->is_overflow) {
    return false;
  }
  const auto speculative = std::count_if(
      bucket.units.begin(), bucket.units.end(),
      [slot](const Unit* unit) { return unit->is_speculative && unit->slot == slot; });
  return speculative == slot->users;
}

// The next gather into the slot starts after this one, and after reads of the compute stream by
// units that were resharded before.
void Gatherer::abandon_gather(Bucket& bucket) {
  Slot& slot = *bucket.slot;
  for (Unit* unit : bucket.units) {
    if (unit->slot == &slot) {
      unit->slot = nullptr;
      unit->state = UnitState::Sharded;
      unit->is_speculative = false;
      ledger_.remove_unsharded_unit();
    }
  }
  bucket.slot = nullptr;
  ledger_.remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  device_.compute_stream().record(*slot.released);
  if (bucket.gathers_in_pieces()) {
    streams_.messages().wait(*bucket.gathers.back().gathered, bucket.gather_label);
  }
  slot.users = 0;
}

// For all units of the bucket that are sharded. They are speculative until they are used.
void Gatherer::retain_slot(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->state == UnitState::Sharded) {
      unit->state = UnitState::Gathering;
      unit->is_speculative = true;
      unit->slot = bucket.slot;
      bucket.slot->users += 1;
      ledger_.add_unsharded_unit();
    }
  }
}

void Gatherer::release_slot(Slot& slot, Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  ledger_.remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  slot.released_after = ledger_.last_compute_moment();
  bool keeps_contents = bucket.slot == &slot;  // else the bucket was gathered again elsewhere
  if (keeps_contents) {
    bucket.slot = nullptr;
  }
  if (poison_) {
    device_.fill(compute, slot.data(), 0xff, slot.bytes);  // a NaN in every floating dtype
    bucket.gathered_from.valid = bucket.gathered_from.valid && !keeps_contents;
    keeps_contents = false;
  }
  if (&slot == bucket.home.get()) {
    compute.record(*slot.released);
    slot.contents = keeps_contents ? bucket.number : Slot::kNobody;
  } else {
    ring_->release(slot, compute, keeps_contents);
  }
}

// - Gathers

void Gatherer::gather_into(Bucket& bucket, Slot& slot) {
  const UnitLayout& layout = bucket.layout;
  const Range range(device_, bucket.gather_label);
  bool has_changed = false;  // since the iteration began
  bucket.gathered_from = {iteration_, 0, true};
  for (Unit* unit : bucket.units) {
    const std::uint64_t version = unit->port.shard_version();
    bucket.gathered_from.version += version;
    has_changed = has_changed || version != unit->followed_version;
    unit->followed_version = version;
    if (unit->state == UnitState::Sharded) {  // others keep the parameters of an earlier gather
      unit->gathered_version = version;
    }
  }
  if (bucket.home != nullptr && &slot != bucket.home.get()) {
    bucket.home->contents = Slot::kNobody;  // out of date
  }
  if (has_changed) {
    streams_.follow_compute();
  }
  Stream& stream = streams_.messages();
  stream.wait(*slot.released, bucket.gather_label);  // Note [slot lifetime]
  if (layout.world_size() == 1) {
    const GatherPiece& whole = bucket.gathers.front();
    const Timed timed(ledger_, stream, Work::Cast, bucket.numbers());
    packer_.cast(stream, whole.cast_plan, nullptr, bucket.flat_shard(), slot.data(), 1.0);
    ledger_.count_copied_bytes(layout.shard_bytes() + layout.gather_bytes());
    stream.record(*whole.gathered);
  } else {
    gather_from_ranks(bucket, slot);
  }
  bucket.gather_issue.refused = 0;
}

// The shards are cast once an iteration: backward gathers what forward has cast. See Note [pieces].
void Gatherer::gather_from_ranks(Bucket& bucket, Slot& slot) {
  const UnitLayout& layout = bucket.layout;
  const bool in_pieces = bucket.gathers_in_pieces();
  const bool casts = layout.needs_cast() && !bucket.cast_from.matches(bucket.gathered_from);
  if (layout.needs_cast() && bucket.gather_input == nullptr) {
    allocate_gather_input(bucket);
  }
  order_before_gather(bucket);
  Stream& before = streams_.before(in_pieces);
  Stream& after = streams_.after(in_pieces);
  for (std::size_t i = 0; i < bucket.gathers.size(); ++i) {
    const GatherPiece& piece = bucket.gathers[i];
    if (casts) {
      cast(bucket, piece, before);
      streams_.order_after(streams_.messages(), before, bucket.gather_label);
    }
    const bool uses_half = in_pieces && piece.plan.packed_bytes > 0;
    if (uses_half) {
      staging_.wait_for_half(streams_.messages(), i, bucket.gather_label);
    }
    gather_piece(bucket, piece, slot, in_pieces ? staging_.half_of(i) : staging_.data());
    if (uses_half) {
      staging_.release_half(after, i);
    }
    after.record(*piece.gathered);
  }
  if (casts) {
    ledger_.count_copied_bytes(layout.shard_bytes() + layout.gather_bytes());
    bucket.cast_from = bucket.gathered_from;
  }
}

void Gatherer::order_before_gather(const Bucket& bucket) {
  if (bucket.gathers_in_pieces()) {
    // The casts overwrite the input, which the bucket's last gather has read.
    Stream& before = streams_.before(/*in_pieces=*/true);
    streams_.order_after_compute(before);
    before.wait(*bucket.gathers.back().gathered, bucket.gather_label);
  } else if (streams_.is_any_in_pieces() && bucket.gathers.front().plan.packed_bytes > 0) {
    staging_.wait_for_both(streams_.messages(), bucket.gather_label);
  }
}

// See Note [gather plans].
void Gatherer::gather_piece(const Bucket& bucket, const GatherPiece& piece, Slot& slot,
                            char* staging) {
  send(bucket, piece, static_cast<char*>(slot.data()), staging);
  Stream& after = streams_.after(bucket.gathers_in_pieces());
  streams_.order_after(after, streams_.messages(), bucket.gather_label);
  if (piece.plan.packed_bytes > 0) {
    const Timed timed(ledger_, after, Work::Unpack, bucket.numbers());
    packer_.unpack(after, piece.plan.unpack, staging, slot.data());
    ledger_.count_copied_bytes(2 * piece.plan.packed_bytes *
                               static_cast<std::size_t>(bucket.layout.world_size()));
  }
}

void Gatherer::send(const Bucket& bucket, const GatherPiece& piece, char* output, char* staging) {
  const GatherPlan& plan = piece.plan;
  const char* input = message_input(bucket);
  Communicator& communicator = lane_.communicator();
  Stream& stream = streams_.messages();
  announce_(bucket, piece.bytes);
  const Timed timed(ledger_, stream, Work::Gather, bucket.numbers(),
                    {piece.bytes, bucket.gather_issue}, /*follows=*/false);
  const bool in_group = plan.direct.size() + (plan.packed_bytes > 0 ? 1 : 0) > 1;
  if (in_group) {
    communicator.group_start();
  }
  for (const GatherMessage& message : plan.direct) {
    communicator.all_gather(stream, input + message.source_offset,
                            output + message.destination_offset, message.bytes);
  }
  if (plan.packed_bytes > 0) {
    communicator.all_gather(stream, input + plan.packed_offset, staging, plan.packed_bytes);
  }
  if (in_group) {
    communicator.group_end();
  }
}

void Gatherer::cast(const Bucket& bucket, const GatherPiece& piece, Stream& stream) {
  const Timed timed(ledger_, stream, Work::Cast, bucket.numbers());
  packer_.cast(stream, piece.cast_plan, nullptr, bucket.flat_shard(), bucket.gather_input.get(),
               1.0);
}

void Gatherer::allocate_gather_input(Bucket& bucket) {
  bucket.gather_input = lane_.allocate(bucket.buffers.gather_input, BufferUse::Input);
  streams_.follow_compute();
}

// Pieces arrive in order. The unit does not wait for those behind its last one.
void Gatherer::wait_for_gather(const Unit& unit) {
  const Bucket& bucket = *unit.bucket;
  ledger_.wait(*bucket.gathers[unit.last_piece].gathered, bucket.gather_label, Work::WaitForGather,
               bucket.numbers());
}

}  // namespace fsdp
