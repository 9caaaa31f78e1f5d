#include "core/gatherer.h"

#include <string>
#include <utility>

#include "base/check.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

const std::string kComputeStream = "the compute stream";
const std::string kGatherStream = "the gather stream";

bool has_slot(const Bucket& bucket) { return bucket.buffers.slot > 0; }

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
      gathers_reached_(device.new_event()),
      handed_over_(device.new_event()),
      unpacked_{device.new_event(), device.new_event()} {}

// What is in flight uses the buffers that go now.
Gatherer::~Gatherer() { lane_.drain(); }

void Gatherer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets, int slots) {
  const GatherMemory memory = plan_gathers(uses_of(buckets), slots);
  staging_bytes_ = memory.staging_bytes;
  any_cut_ = memory.any_cut;
  // What is in flight may still use the memory of the plan before.
  lane_.synchronize();
  if (any_cut_) {
    lane_.make_copy_streams();
  }
  buckets_ = &buckets;
  ring_ = std::make_unique<BufferRing>(
      device_, [this](std::size_t bytes) { return lane_.allocate(bytes, BufferUse::Output); },
      memory.slots, memory.slot_bytes);
  staging_ = staging_bytes_ > 0 ? lane_.allocate(staging_bytes_, BufferUse::Output) : nullptr;
  follow_compute();  // Note [memory and the compute stream]
  for (const auto& bucket : buckets) {
    if (bucket->units.front()->reshard_after_forward && bucket->home != nullptr &&
        bucket->home->holders == 0) {
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
  return unit.layout.is_identity() || unit.layout.unsharded_bytes() == 0 ||
         (unit.bucket->gathered_from.valid && unit.gathered_version == unit.port.shard_version());
}

bool Gatherer::unshard(Unit& unit, bool on_demand) {
  if (unit.state == UnitState::Sharded && !bring(unit, on_demand)) {
    return false;
  }
  unit.is_speculative = unit.is_speculative && !on_demand;
  return true;
}

bool Gatherer::bring(Unit& unit, bool on_demand) {
  Bucket& bucket = *unit.bucket;
  if (!has_slot(bucket)) {
    ledger_.add_unsharded_unit();
    ledger_.add_unsharded_bytes(unit.layout.unsharded_bytes());
    unit.state = UnitState::Gathering;
    unit.is_speculative = true;
    return true;
  }
  const bool is_held = bucket.slot != nullptr && bucket.gathered_from.valid &&
                       bucket.gathered_from.iteration == iteration_;
  if (!is_held || unit.gathered_version != unit.port.shard_version()) {
    Slot* slot = current_slot(bucket);
    if (slot != nullptr) {
      ledger_.count_reused_unshard();
    } else {
      slot = free_slot(bucket, on_demand);
      note_issue(bucket, slot, on_demand);
      if (slot == nullptr) {
        return false;
      }
      gather_into(bucket, *slot);
    }
    bucket.slot = slot;
    ledger_.add_unsharded_bytes(bucket.layout.unsharded_bytes());
  }
  hold(bucket);
  return true;
}

// For the ledger: when, and since when that could have been.
void Gatherer::note_issue(Bucket& bucket, const Slot* slot, bool on_demand) {
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

// All units that have let go, or not come yet: whose turn it is will say so.
void Gatherer::hold(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->state == UnitState::Sharded) {
      unit->state = UnitState::Gathering;
      unit->is_speculative = true;
      unit->slot = bucket.slot;
      bucket.slot->holders += 1;
      ledger_.add_unsharded_unit();
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
    const bool is_whole = bucket.home->contents == bucket.number && bucket.home->holders == 0;
    return is_whole ? bucket.home.get() : nullptr;
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
  ledger_.count_overflow_slot();
  Slot* slot = ring_->take_overflow(bucket.number, bytes);
  follow_compute();
  return slot;
}

// Null while some unit still holds what was gathered into it before.
Slot* Gatherer::home_of(Bucket& bucket) {
  if (bucket.home == nullptr) {
    bucket.home = std::make_unique<Slot>();
    bucket.home->bytes = bucket.buffers.slot;
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

// A gather nobody asks for any more, or not yet, gives its slot up. The new one follows it, and
// what units that have let go may still read there on the compute stream.
Slot* Gatherer::take_speculative_slot(int bucket) {
  for (const auto& other : *buckets_) {
    Slot* slot = other->slot;
    if (slot == nullptr || slot == other->home.get() || slot->overflow) {
      continue;
    }
    int speculative = 0;
    for (const Unit* unit : other->units) {
      speculative += unit->is_speculative && unit->slot == slot ? 1 : 0;
    }
    if (speculative < slot->holders) {
      continue;
    }
    for (Unit* unit : other->units) {
      if (unit->slot == slot) {
        unit->slot = nullptr;
        unit->state = UnitState::Sharded;
        unit->is_speculative = false;
        ledger_.remove_unsharded_unit();
      }
    }
    other->slot = nullptr;
    ledger_.remove_unsharded_bytes(other->layout.unsharded_bytes());
    device_.compute_stream().record(*slot->released);
    if (other->gathers.size() > 1) {
      stream_.wait(*other->gathers.back().gathered, other->gather_label);
    }
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
    const std::uint64_t version = unit->port.shard_version();
    bucket.gathered_from.version += version;
    changed = changed || version != unit->followed_version;
    unit->followed_version = version;
    if (unit->state == UnitState::Sharded) {  // else it has what was gathered before
      unit->gathered_version = version;
    }
  }
  if (bucket.home != nullptr && &slot != bucket.home.get()) {
    bucket.home->contents = Slot::kNobody;  // as they were before
  }
  if (changed) {
    follow_compute();
  }
  stream_.wait(*slot.released, bucket.gather_label);  // Note [slot lifetime]
  if (layout.world_size() == 1) {
    const GatherPiece& all = bucket.gathers.front();
    const Timed timed(ledger_, stream_, Work::Cast, bucket.numbers());
    packer_.cast(stream_, all.cast_plan, nullptr, bucket.flat_shard(), slot.data(), 1.0);
    ledger_.count_copied_bytes(layout.shard_bytes() + layout.gather_bytes());
    stream_.record(*all.gathered);
  } else {
    gather_from_ranks(bucket, slot);
  }
  bucket.gather_issue.refused = 0;
}

// Cast once an iteration: backward gathers what forward has cast. See Note [pieces].
void Gatherer::gather_from_ranks(Bucket& bucket, Slot& slot) {
  const bool in_pieces = bucket.gathers.size() > 1;
  const UnitLayout& layout = bucket.layout;
  const char* input = gather_input(bucket);
  const bool casts = layout.needs_cast() && !bucket.cast_from.matches(bucket.gathered_from);
  if (in_pieces) {
    // Behind what stream_ is behind, and behind the bucket's own last gather, which read the input.
    lane_.before().wait(*compute_reached_, kComputeStream);
    lane_.before().wait(*bucket.gathers.back().gathered, bucket.gather_label);
  } else if (any_cut_ && bucket.gathers.front().plan.packed_bytes > 0) {
    stream_.wait(*unpacked_[0], bucket.gather_label);
    stream_.wait(*unpacked_[1], bucket.gather_label);
  }
  Stream& before = in_pieces ? lane_.before() : stream_;
  for (std::size_t i = 0; i < bucket.gathers.size(); ++i) {
    const GatherPiece& piece = bucket.gathers[i];
    if (casts) {
      cast(bucket, piece, before);
      hand_over(before, stream_, bucket.gather_label);
    }
    auto* staging = static_cast<char*>(staging_.get());
    if (!in_pieces) {
      send(bucket, piece, input, slot, staging);
      stream_.record(*piece.gathered);
      continue;
    }
    Stream& after = lane_.after();
    staging += i % 2 * (staging_bytes_ / 2);
    if (piece.plan.packed_bytes > 0) {
      stream_.wait(*unpacked_[i % 2], bucket.gather_label);
    }
    send(bucket, piece, input, slot, staging);
    if (piece.plan.packed_bytes > 0) {
      after.record(*unpacked_[i % 2]);
    }
    after.record(*piece.gathered);
  }
  if (casts) {
    ledger_.count_copied_bytes(layout.shard_bytes() + layout.gather_bytes());
    bucket.cast_from = bucket.gathered_from;
  }
}

// See Note [gather plans].
void Gatherer::send(const Bucket& bucket, const GatherPiece& piece, const char* input, Slot& slot,
                    char* staging) {
  const GatherPlan& plan = piece.plan;
  Communicator& communicator = lane_.communicator();
  communicator.announce(bucket.gather_label);
  announce_(bucket, piece.bytes);
  auto* output = static_cast<char*>(slot.data());
  {
    const Timed timed(ledger_, stream_, Work::Gather, bucket.numbers(),
                      {piece.bytes, bucket.gather_issue}, /*follows=*/false);
    const bool in_group = plan.direct.size() + (plan.packed_bytes > 0 ? 1 : 0) > 1;
    if (in_group) {
      communicator.group_start();
    }
    for (const GatherMessage& message : plan.direct) {
      communicator.all_gather(stream_, input + message.source_offset,
                              output + message.destination_offset, message.bytes);
    }
    if (plan.packed_bytes > 0) {
      communicator.all_gather(stream_, input + plan.packed_offset, staging, plan.packed_bytes);
    }
    if (in_group) {
      communicator.group_end();
    }
  }
  Stream& after = bucket.gathers.size() > 1 ? lane_.after() : stream_;
  hand_over(stream_, after, bucket.gather_label);
  if (plan.packed_bytes > 0) {
    const Timed timed(ledger_, after, Work::Unpack, bucket.numbers());
    packer_.unpack(after, plan.unpack, staging, slot.data());
    ledger_.count_copied_bytes(2 * plan.packed_bytes *
                               static_cast<std::size_t>(bucket.layout.world_size()));
  }
}

void Gatherer::cast(const Bucket& bucket, const GatherPiece& piece, Stream& stream) {
  const Timed timed(ledger_, stream, Work::Cast, bucket.numbers());
  packer_.cast(stream, piece.cast_plan, nullptr, bucket.flat_shard(), bucket.gather_input.get(),
               1.0);
}

// `to` comes behind what `from` was given so far.
void Gatherer::hand_over(Stream& from, Stream& to, const std::string& what) {
  if (&from != &to) {
    from.record(*handed_over_);
    to.wait(*handed_over_, what);
  }
}

const char* Gatherer::gather_input(Bucket& bucket) {
  if (!bucket.layout.needs_cast()) {
    return static_cast<const char*>(bucket.flat_shard());
  }
  if (bucket.gather_input == nullptr) {
    bucket.gather_input = lane_.allocate(bucket.buffers.gather_input, BufferUse::Input);
    follow_compute();
  }
  return static_cast<const char*>(bucket.gather_input.get());
}

// A capture expects that what forked from the stream that it began on joins it again.
void Gatherer::join_capture() {
  if (!device_.is_capturing()) {
    return;
  }
  Stream& last = any_cut_ ? lane_.after() : stream_;
  hand_over(stream_, last, kGatherStream);
  last.record(*gathers_reached_);
  device_.compute_stream().wait(*gathers_reached_, kGatherStream);
}

bool Gatherer::attach(Unit& unit) {
  if (unit.state == UnitState::Unsharded) {
    return false;
  }
  bool has_waited = false;
  FSDP_CHECK(unit.state == UnitState::Gathering, "attaching the parameters of unit '", unit.name,
             "' expects a gather to have been issued");
  unit.is_speculative = false;
  if (unit.layout.is_identity()) {
    unit.port.attach(unit.port.flat_shard());
  } else if (unit.slot == nullptr) {
    unit.port.attach(nullptr);
  } else {
    wait_for_gather(unit);
    has_waited = true;
    unit.port.attach(static_cast<char*>(unit.slot->data()) + unit.unsharded_offset);
  }
  unit.state = UnitState::Unsharded;
  return has_waited;
}

// Pieces arrive in order, so that those behind the unit's last one are not waited for.
void Gatherer::wait_for_gather(const Unit& unit) {
  const Bucket& bucket = *unit.bucket;
  ledger_.wait(*bucket.gathers[unit.last_piece].gathered, bucket.gather_label, Work::WaitForGather,
               bucket.numbers());
}

void Gatherer::reshard(Unit& unit) {
  if (unit.state == UnitState::Sharded) {
    return;
  }
  if (unit.state == UnitState::Unsharded) {
    unit.port.detach();
  }
  const std::vector<GatherPiece>& gathers = unit.bucket->gathers;
  if (unit.slot != nullptr && unit.slot->holders == 1 &&
      (unit.state == UnitState::Gathering || unit.last_piece + 1 < gathers.size())) {
    // Whoever writes there next comes behind the whole gather.
    device_.compute_stream().wait(*gathers.back().gathered, unit.bucket->gather_label);
  }
  unit.state = UnitState::Sharded;
  unit.is_speculative = false;
  ledger_.remove_unsharded_unit();
  Slot* slot = std::exchange(unit.slot, nullptr);
  if (slot == nullptr) {
    ledger_.remove_unsharded_bytes(unit.layout.unsharded_bytes());
    return;
  }
  slot->holders -= 1;
  if (slot->holders == 0) {
    let_go(*slot, *unit.bucket);
  }
}

void Gatherer::let_go(Slot& slot, Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  ledger_.remove_unsharded_bytes(bucket.layout.unsharded_bytes());
  slot.released_after = ledger_.last_compute_moment();
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

void Gatherer::reshard_speculative(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->is_speculative) {
      reshard(*unit);
    }
  }
}

// All bits set is a NaN in every floating dtype.
void Gatherer::poison(Slot& slot) {
  device_.fill(device_.compute_stream(), slot.data(), 0xff, slot.bytes);
}

}  // namespace fsdp
