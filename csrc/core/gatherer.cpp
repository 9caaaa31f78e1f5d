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
std::size_t staging_bytes_of(const Unit& unit) {
  return unit.gather_plan.packed_bytes * static_cast<std::size_t>(unit.layout.world_size());
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

void Gatherer::plan_memory(const std::vector<std::unique_ptr<Unit>>& units, int slots) {
  std::size_t slot_bytes = 0;
  int ring_units = 0;
  staging_bytes_ = 0;
  for (const auto& unit : units) {
    const UnitLayout& layout = unit->layout;
    if (is_identity(*unit) || layout.unsharded_bytes() == 0) {
      continue;
    }
    if (unit->reshard_after_forward) {
      slot_bytes = std::max(slot_bytes, layout.unsharded_bytes());
      ring_units += 1;
    }
    staging_bytes_ = std::max(staging_bytes_, staging_bytes_of(*unit));
  }
  // What is in flight may still use the memory of the plan before.
  stream_.synchronize();
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      std::min(slots, ring_units), slot_bytes);
  staging_ = staging_bytes_ > 0 ? lane_.allocate(staging_bytes_, BufferUse::Output) : nullptr;
  follow_compute();  // Note [memory and the compute stream]
  for (const auto& unit : units) {
    if (unit->reshard_after_forward && unit->state == UnitState::Sharded) {
      unit->home.reset();
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

// One rank and no cast: the flat shard has the unsharded layout already.
bool Gatherer::is_identity(const Unit& unit) const {
  return unit.layout.world_size() == 1 && !unit.layout.needs_cast();
}

bool Gatherer::is_current(Unit& unit) {
  return is_identity(unit) ||
         (unit.gathered_from.valid && unit.gathered_from.version == unit.port.shard_version());
}

bool Gatherer::issue(Unit& unit, bool on_demand, const std::vector<std::unique_ptr<Unit>>& units) {
  if (unit.state != UnitState::Sharded) {
    unit.speculative = unit.speculative && !on_demand;
    return true;
  }
  if (!is_identity(unit) && unit.layout.unsharded_bytes() > 0) {
    unit.slot = current_slot(unit);
    if (unit.slot != nullptr) {
      ledger_.counters().reused_unshards += 1;
    } else {
      unit.slot = free_slot(unit, on_demand, units);
      if (unit.slot == nullptr) {
        return false;
      }
      gather_into(unit, *unit.slot);
    }
  }
  unit.state = UnitState::Gathering;
  unit.speculative = !on_demand;
  ledger_.unsharded(unit.layout.unsharded_bytes());
  return true;
}

// See Note [lazy reshard].
Slot* Gatherer::current_slot(Unit& unit) {
  const ShardStamp now{iteration_, unit.port.shard_version(), true};
  if (!unit.gathered_from.matches(now)) {
    return nullptr;
  }
  if (unit.home != nullptr) {
    return unit.home->contents == unit.number ? unit.home.get() : nullptr;
  }
  Slot* slot = ring_->find_contents(unit.number);
  if (slot != nullptr) {
    ring_->take_back(*slot, unit.number);
  }
  return slot;
}

Slot* Gatherer::free_slot(Unit& unit, bool on_demand,
                          const std::vector<std::unique_ptr<Unit>>& units) {
  const std::size_t bytes = unit.layout.unsharded_bytes();
  if (!unit.reshard_after_forward) {
    if (unit.home == nullptr) {
      unit.home = std::make_unique<Slot>();
      unit.home->memory = lane_.allocate(bytes, BufferUse::Output);
      unit.home->bytes = bytes;
      unit.home->released = device_.new_event();
      follow_compute();
    }
    unit.home->contents = unit.number;
    return unit.home.get();
  }
  if (bytes <= ring_->slot_bytes()) {
    if (Slot* slot = ring_->try_take(unit.number)) {
      return slot;
    }
    if (!on_demand) {
      return nullptr;
    }
    // A gather nobody asked for yet gives its slot up. The new one follows it on the gather
    // stream, so nothing has to wait.
    for (const auto& other : units) {
      if (other->speculative && other->slot != nullptr && other->slot != other->home.get() &&
          !other->slot->overflow) {
        Slot* slot = other->slot;
        other->slot = nullptr;
        other->state = UnitState::Sharded;
        other->speculative = false;
        ledger_.resharded(other->layout.unsharded_bytes());
        slot->owner = slot->contents = unit.number;
        return slot;
      }
    }
  }
  if (!on_demand) {
    return nullptr;
  }
  ledger_.counters().overflow_slots += 1;
  Slot* slot = ring_->take_overflow(unit.number, bytes);
  follow_compute();
  return slot;
}

void Gatherer::gather_into(Unit& unit, Slot& slot) {
  const UnitLayout& layout = unit.layout;
  const Range range(device_, unit.gather_label);
  const std::uint64_t version = unit.port.shard_version();
  if (version != unit.followed_version) {  // changed since the iteration began
    follow_compute();
    unit.followed_version = version;
  }
  unit.gathered_from = {iteration_, version, true};
  stream_.wait(*slot.released, unit.gather_label);  // Note [slot lifetime]
  if (layout.world_size() == 1) {
    packer_.cast(stream_, unit.cast_plan, nullptr, unit.port.flat_shard(), slot.data(), 1.0);
    ledger_.copied(layout.shard_bytes() + layout.gather_bytes());
  } else {
    gather_from_ranks(unit, slot);
  }
  stream_.record(*unit.gathered);
}

// See Note [gather plans].
void Gatherer::gather_from_ranks(Unit& unit, Slot& slot) {
  const GatherPlan& plan = unit.gather_plan;
  const auto world_size = static_cast<std::size_t>(unit.layout.world_size());
  Communicator& communicator = lane_.communicator();
  communicator.announce(unit.gather_label);
  std::size_t bytes = plan.packed_bytes;
  for (const GatherMessage& message : plan.direct) {
    bytes += message.bytes;
  }
  announce_(unit, bytes * world_size);
  const auto* input = static_cast<const char*>(gather_input(unit));
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
    ledger_.copied(2 * staging_bytes_of(unit));
  }
}

// Cast once an iteration: backward gathers what forward has cast.
const void* Gatherer::gather_input(Unit& unit) {
  const UnitLayout& layout = unit.layout;
  if (!layout.needs_cast()) {
    return unit.port.flat_shard();
  }
  if (unit.gather_input == nullptr) {
    unit.gather_input = lane_.allocate(layout.gather_bytes(), BufferUse::Input);
    follow_compute();
  }
  if (!unit.cast_from.matches(unit.gathered_from)) {
    packer_.cast(stream_, unit.cast_plan, nullptr, unit.port.flat_shard(), unit.gather_input.get(),
                 1.0);
    ledger_.copied(layout.shard_bytes() + layout.gather_bytes());
    unit.cast_from = unit.gathered_from;
  }
  return unit.gather_input.get();
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
  if (is_identity(unit)) {
    unit.port.attach(unit.port.flat_shard());
  } else {
    device_.compute_stream().wait(*unit.gathered, unit.gather_label);
    unit.port.attach(unit.slot != nullptr ? unit.slot->data() : nullptr);
  }
  unit.state = UnitState::Unsharded;
}

void Gatherer::release(Unit& unit) {
  if (unit.state == UnitState::Sharded) {
    return;
  }
  Stream& compute = device_.compute_stream();
  if (unit.state == UnitState::Unsharded) {
    unit.port.detach();
  } else if (unit.slot != nullptr) {
    compute.wait(*unit.gathered, unit.gather_label);
  }
  Slot* slot = std::exchange(unit.slot, nullptr);
  unit.state = UnitState::Sharded;
  unit.speculative = false;
  ledger_.resharded(unit.layout.unsharded_bytes());
  if (slot == nullptr) {
    return;
  }
  if (poison_) {
    poison(*slot);
    unit.gathered_from.valid = false;
  }
  if (slot == unit.home.get()) {
    compute.record(*slot->released);
  } else {
    ring_->release(*slot, compute, /*keeps_contents=*/!poison_);
  }
}

// All bits set is a NaN in every floating dtype.
void Gatherer::poison(Slot& slot) {
  device_.fill(device_.compute_stream(), slot.data(), 0xff, slot.bytes);
}

}  // namespace fsdp
