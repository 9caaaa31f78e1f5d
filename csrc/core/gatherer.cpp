#include "core/gatherer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";
const std::string kGatherStream = "the gather stream";

// Of all ranks; 0 where the ranks' chunks go to their places directly.
std::size_t staging_bytes_of(const Bucket& bucket) {
  return bucket.gather_plan.packed_bytes * static_cast<std::size_t>(bucket.layout.world_size());
}

// One rank and no cast: the flat shard has the unsharded layout already.
bool is_identity(const UnitLayout& layout) {
  return layout.world_size() == 1 && !layout.needs_cast();
}

bool has_slot(const Bucket& bucket) {
  return !is_identity(bucket.layout) && bucket.layout.unsharded_bytes() > 0;
}

// Changes if one of the units' does.
std::uint64_t version_of(const Bucket& bucket) {
  std::uint64_t version = 0;
  for (const Unit* unit : bucket.units) {
    version += unit->port.shard_version();
  }
  return version;
}

}  // namespace

Gatherer::Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce)
    : device_(device),
      packer_(packer),
      lane_(lane),
      stream_(lane.stream()),
      ledger_(ledger),
      announce_(std::move(announce)),
      compute_reached_(device.new_event()),
      gathers_reached_(device.new_event()) {}

// What is in flight uses the buffers that go now.
Gatherer::~Gatherer() { lane_.drain(); }

void Gatherer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots) {
  std::size_t slot_bytes = 0;
  int ring_buckets = 0;
  staging_bytes_ = 0;
  for (const auto& bucket : buckets) {
    if (!has_slot(*bucket)) {
      continue;
    }
    if (bucket->units.front()->reshard_after_forward) {
      slot_bytes = std::max(slot_bytes, bucket->layout.unsharded_bytes());
      ring_buckets += 1;
    }
    staging_bytes_ = std::max(staging_bytes_, staging_bytes_of(*bucket));
  }
  // What is in flight may still use the memory of the plan before.
  stream_.synchronize();
  buckets_ = &buckets;
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      std::min(slots, ring_buckets), slot_bytes);
  staging_ = staging_bytes_ > 0 ? lane_.allocate(staging_bytes_, BufferUse::Output) : nullptr;
  follow_compute();  // Note [memory and the compute stream]
  for (const auto& bucket : buckets) {
    if (bucket->units.front()->reshard_after_forward && bucket->slot == nullptr) {
      bucket->home.reset();
    }
  }
}

void Gatherer::begin_iteration() {
  iteration_ += 1;
  follow_compute();
  if (ring_ != nullptr) {
    ring_->forget_contents();
  }
}

// What the compute stream was given so far comes before what this one is given from now on.
void Gatherer::follow_compute() {
  device_.compute_stream().record(*compute_reached_);
  stream_.wait(*compute_reached_, kComputeStream);
}

bool Gatherer::is_current(Unit& unit) {
  return is_identity(unit.layout) || unit.layout.unsharded_bytes() == 0 ||
         (unit.bucket->gathered_from.valid && unit.gathered_version == unit.port.shard_version());
}

bool Gatherer::issue(Unit& unit, bool on_demand) {
  if (unit.state == UnitState::Sharded && !bring(unit, on_demand)) {
    return false;
  }
  unit.speculative = unit.speculative && !on_demand;
  return true;
}

bool Gatherer::bring(Unit& unit, bool on_demand) {
  Bucket& bucket = *unit.bucket;
  if (!has_slot(bucket)) {
    ledger_.unsharded(1, unit.layout.unsharded_bytes());
    unit.state = UnitState::Gathering;
    unit.speculative = true;
    return true;
  }
  const bool is_held = bucket.slot != nullptr && bucket.gathered_from.valid &&
                       bucket.gathered_from.iteration == iteration_;
  if (!is_held || unit.gathered_version != unit.port.shard_version()) {
    Slot* slot = current_slot(bucket);
    if (slot != nullptr) {
      ledger_.counters().reused_unshards += 1;
    } else {
      slot = free_slot(bucket, on_demand);
      if (slot == nullptr) {
        return false;
      }
      gather_into(bucket, *slot);
    }
    bucket.slot = slot;
    ledger_.unsharded(0, bucket.layout.unsharded_bytes());
  }
  hold(bucket);
  return true;
}

// All units that have let go, or not come yet: whose turn it is will say so.
void Gatherer::hold(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->state == UnitState::Sharded) {
      unit->state = UnitState::Gathering;
      unit->speculative = true;
      unit->slot = bucket.slot;
      bucket.slot->holders += 1;
      ledger_.unsharded(1, 0);
    }
  }
}

// See Note [lazy reshard].
Slot* Gatherer::current_slot(Bucket& bucket) {
  const ShardStamp now{iteration_, version_of(bucket), true};
  if (bucket.slot != nullptr || !bucket.gathered_from.matches(now)) {
    return nullptr;
  }
  if (bucket.home != nullptr) {
    return bucket.home->contents == bucket.number ? bucket.home.get() : nullptr;
  }
  Slot* slot = ring_->find_contents(bucket.number);
  if (slot != nullptr) {
    ring_->take_back(*slot, bucket.number);
  }
  return slot;
}

Slot* Gatherer::free_slot(Bucket& bucket, bool on_demand) {
  const std::size_t bytes = bucket.layout.unsharded_bytes();
  if (!bucket.units.front()->reshard_after_forward) {
    if (Slot* home = home_of(bucket)) {
      return home;
    }
  } else if (bytes <= ring_->slot_bytes()) {
    if (Slot* slot = ring_->try_take(bucket.number)) {
      return slot;
    }
    if (Slot* slot = on_demand ? take_speculative_slot(bucket.number) : nullptr) {
      return slot;
    }
  }
  if (!on_demand) {
    return nullptr;
  }
  ledger_.counters().overflow_slots += 1;
  Slot* slot = ring_->take_overflow(bucket.number, bytes);
  follow_compute();
  return slot;
}

// Null while some unit still holds what was gathered into it before.
Slot* Gatherer::home_of(Bucket& bucket) {
  if (bucket.home == nullptr) {
    bucket.home = std::make_unique<Slot>();
    bucket.home->bytes = bucket.layout.unsharded_bytes();
    bucket.home->memory = lane_.allocate(bucket.home->bytes, BufferUse::Output);
    bucket.home->released = device_.new_event();
    follow_compute();
  }
  if (bucket.home->holders > 0) {
    return nullptr;
  }
  bucket.home->contents = bucket.number;
  return bucket.home.get();
}

// A gather nobody asks for any more, or not yet, gives its slot up. The new one follows it on the
// gather stream, and what units that have let go may still read there on the compute stream.
Slot* Gatherer::take_speculative_slot(int bucket) {
  for (const auto& other : *buckets_) {
    Slot* slot = other->slot;
    if (slot == nullptr || slot == other->home.get() || slot->overflow) {
      continue;
    }
    int speculative = 0;
    for (const Unit* unit : other->units) {
      speculative += unit->speculative && unit->slot == slot ? 1 : 0;
    }
    if (speculative < slot->holders) {
      continue;
    }
    for (Unit* unit : other->units) {
      if (unit->slot == slot) {
        unit->slot = nullptr;
        unit->state = UnitState::Sharded;
        unit->speculative = false;
        ledger_.resharded(1, 0);
      }
    }
    other->slot = nullptr;
    ledger_.resharded(0, other->layout.unsharded_bytes());
    device_.compute_stream().record(*slot->released);
    slot->holders = 0;
    slot->owner = slot->contents = bucket;
    return slot;
  }
  return nullptr;
}

void Gatherer::gather_into(Bucket& bucket, Slot& slot) {
  const UnitLayout& layout = bucket.layout;
  const Range range(device_, bucket.gather_label);
  bool changed = false;  // since the iteration began
  bucket.gathered_from = {iteration_, 0, true};
  for (Unit* unit : bucket.units) {
    unit->gathered_version = unit->port.shard_version();
    bucket.gathered_from.version += unit->gathered_version;
    changed = changed || unit->gathered_version != unit->followed_version;
    unit->followed_version = unit->gathered_version;
  }
  if (changed) {
    follow_compute();
  }
  stream_.wait(*slot.released, bucket.gather_label);  // Note [slot lifetime]
  if (layout.world_size() == 1) {
    packer_.cast(stream_, bucket.cast_plan, nullptr, bucket.flat_shard(), slot.data(), 1.0);
    ledger_.copied(layout.shard_bytes() + layout.gather_bytes());
  } else {
    gather_from_ranks(bucket, slot);
  }
  stream_.record(*bucket.gathered);
}

// See Note [gather plans].
void Gatherer::gather_from_ranks(Bucket& bucket, Slot& slot) {
  const GatherPlan& plan = bucket.gather_plan;
  const auto world_size = static_cast<std::size_t>(bucket.layout.world_size());
  Communicator& communicator = lane_.communicator();
  communicator.announce(bucket.gather_label);
  std::size_t bytes = plan.packed_bytes;
  for (const GatherMessage& message : plan.direct) {
    bytes += message.bytes;
  }
  announce_(bucket, bytes * world_size);
  const auto* input = static_cast<const char*>(gather_input(bucket));
  auto* output = static_cast<char*>(slot.data());
  const bool in_group = plan.direct.size() + (plan.packed_bytes > 0 ? 1 : 0) > 1;
  if (in_group) {
    communicator.group_start();
  }
  for (const GatherMessage& message : plan.direct) {
    communicator.all_gather(stream_, input + message.source_offset,
                            output + message.destination_offset, message.bytes);
  }
  if (plan.packed_bytes > 0) {
    communicator.all_gather(stream_, input + plan.packed_offset, staging_.get(), plan.packed_bytes);
  }
  if (in_group) {
    communicator.group_end();
  }
  if (plan.packed_bytes > 0) {
    packer_.unpack(stream_, plan.unpack, staging_.get(), slot.data());
    ledger_.copied(2 * staging_bytes_of(bucket));
  }
}

// Cast once an iteration: backward gathers what forward has cast.
const void* Gatherer::gather_input(Bucket& bucket) {
  const UnitLayout& layout = bucket.layout;
  if (!layout.needs_cast()) {
    return bucket.flat_shard();
  }
  if (bucket.gather_input == nullptr) {
    bucket.gather_input = lane_.allocate(layout.gather_bytes(), BufferUse::Input);
    follow_compute();
  }
  if (!bucket.cast_from.matches(bucket.gathered_from)) {
    packer_.cast(stream_, bucket.cast_plan, nullptr, bucket.flat_shard(), bucket.gather_input.get(),
                 1.0);
    ledger_.copied(layout.shard_bytes() + layout.gather_bytes());
    bucket.cast_from = bucket.gathered_from;
  }
  return bucket.gather_input.get();
}

// A capture expects that what forked from the stream that it began on joins it again.
void Gatherer::join_capture() {
  if (!device_.is_capturing()) {
    return;
  }
  stream_.record(*gathers_reached_);
  device_.compute_stream().wait(*gathers_reached_, kGatherStream);
}

void Gatherer::attach(Unit& unit) {
  if (unit.state == UnitState::Unsharded) {
    return;
  }
  FSDP_CHECK(unit.state == UnitState::Gathering, "attaching the parameters of unit '", unit.name,
             "' expects a gather to have been issued");
  unit.speculative = false;
  if (is_identity(unit.layout)) {
    unit.port.attach(unit.port.flat_shard());
  } else if (unit.slot == nullptr) {
    unit.port.attach(nullptr);
  } else {
    device_.compute_stream().wait(*unit.bucket->gathered, unit.bucket->gather_label);
    unit.port.attach(static_cast<char*>(unit.slot->data()) + unit.unsharded_offset);
  }
  unit.state = UnitState::Unsharded;
}

void Gatherer::release(Unit& unit) {
  if (unit.state == UnitState::Sharded) {
    return;
  }
  if (unit.state == UnitState::Unsharded) {
    unit.port.detach();
  } else if (unit.slot != nullptr && unit.slot->holders == 1) {
    device_.compute_stream().wait(*unit.bucket->gathered, unit.bucket->gather_label);
  }
  unit.state = UnitState::Sharded;
  unit.speculative = false;
  Slot* slot = std::exchange(unit.slot, nullptr);
  if (slot == nullptr) {
    ledger_.resharded(1, unit.layout.unsharded_bytes());
    return;
  }
  ledger_.resharded(1, 0);
  slot->holders -= 1;
  if (slot->holders == 0) {
    let_go(*slot, *unit.bucket);
  }
}

void Gatherer::let_go(Slot& slot, Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  ledger_.resharded(0, bucket.layout.unsharded_bytes());
  bool keeps_contents = bucket.slot == &slot;  // else they were gathered anew elsewhere
  if (keeps_contents) {
    bucket.slot = nullptr;
  }
  if (poison_) {
    poison(slot);
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

void Gatherer::release_leftovers(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->speculative) {
      release(*unit);
    }
  }
}

// All bits set is a NaN in every floating dtype.
void Gatherer::poison(Slot& slot) {
  device_.fill(device_.compute_stream(), slot.data(), 0xff, slot.bytes);
}

}  // namespace fsdp
