#include "core/gather/gatherer.h"

#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "core/schedule/announcer.h"
#include "device/host_clock.h"

namespace fsdp {
namespace {

const std::string kGatherStream = "the gather stream";

bool needs_slot(const Bucket& bucket) { return bucket.buffers.slot > 0; }

// See Note [custom collectives] in core/reduce/user_collective.h.
UserCollective* gather_hook_of(const Bucket& bucket) {
  const bool may_have_one = bucket.units.size() == 1 && !bucket.gather.source().is_of_group();
  return may_have_one ? bucket.units.front()->gather_hook.get() : nullptr;
}

// The tensors have the parameters' dtype if all have the same, and are bytes otherwise, as FSDP2's.
void gather_by_hook(UserCollective& hook, Stream& stream, const UnitLayout& layout,
                    const LayoutPart& part, const GatherPart& message) {
  DType dtype = layout.params()[part.first].param_dtype;
  for (std::size_t i = part.first; i < part.end; ++i) {
    dtype = layout.params()[i].param_dtype == dtype ? dtype : DType::Bytes;
  }
  const std::size_t numel = message.bytes / itemsize(dtype);
  hook.issue(stream, {message.output, numel * static_cast<std::size_t>(layout.world_size()), dtype,
                      const_cast<void*>(message.input), numel});
}

}  // namespace

Gatherer::Gatherer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announcer& announcer)
    : device_(device),
      packer_(packer),
      lane_(lane),
      streams_(device, lane),
      ledger_(ledger),
      announcer_(announcer),
      slots_(device, lane, streams_, ledger),
      staging_(device) {}

// Work in flight uses the buffers that are freed now.
Gatherer::~Gatherer() {
  try {
    slots_.wait_for_readers();
  } catch (const std::exception&) {
    // The device has failed, or a kernel of the user does not end. A destructor cannot say so.
  }
  lane_.drain();
}

void Gatherer::synchronize() {
  slots_.wait_for_readers();
  lane_.synchronize();
}

void Gatherer::finish_reading_host() {
  if (!is_any_offloaded_) {
    return;
  }
  for (const auto& bucket : *buckets_) {
    if (bucket->layout.is_offloaded()) {
      FSDP_CHECK(!device_.is_capturing(), "A CUDA graph would capture unit '", bucket->name,
                 "', which is offloaded to the host, and a graph cannot wait for the host. Run "
                 "without a capture, or without CPUOffloadPolicy.");
      const GatherSource& source = bucket->gather.all_ranks_;
      source.last_piece().gathered->synchronize(device_.timeout(), source.label);
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

// Whether the unsharded parameters match the shards, as far as versions tell.
bool Gatherer::is_current(Unit& unit) const {
  if (unit.layout.is_identity() && unit.port.computes_inputs()) {
    return unit.gather.inputs_version_ == unit.shard_version();
  }
  return unit.layout.is_identity() || unit.layout.unsharded_bytes() == 0 ||
         (unit.bucket->gather.gathered_from_.valid &&
          unit.gather.gathered_version_ == unit.shard_version());
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

// - Gather

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
    Slot* slot = slots_.reacquire(bucket, iteration_);
    if (slot != nullptr) {
      ledger_.counters().reused_unshards += 1;
    } else {
      for (Unit* member : bucket.units) {
        compute_inputs(*member);  // first, since a user's function may raise
      }
      slot = slots_.acquire(bucket, on_demand);
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

// Inputs of extensions are computed when shards are cast: once an iteration, and again if shards
// have changed. They overwrite the inputs that the bucket's last gather reads, so they wait for it.
void Gatherer::compute_inputs(Unit& unit) {
  if (!unit.port.computes_inputs()) {
    return;
  }
  const std::uint64_t version = unit.shard_version();
  if (unit.gather.inputs_iteration_ == iteration_ && unit.gather.inputs_version_ == version) {
    return;
  }
  const GatherSource& source = unit.bucket->gather.all_ranks_;
  device_.compute_stream().wait(*source.last_piece().gathered, source.label);
  unit.port.compute_inputs();
  streams_.follow_compute();
  unit.gather.inputs_iteration_ = iteration_;
  unit.gather.inputs_version_ = version;
}

void Gatherer::gather_into(Bucket& bucket, Slot& slot) {
  const UnitLayout& layout = bucket.layout;
  bool has_changed = false;  // since the iteration began
  bucket.gather.gathered_from_ = {iteration_, 0, true};
  for (Unit* unit : bucket.units) {
    const std::uint64_t version = unit->shard_version();
    bucket.gather.gathered_from_.version += version;
    has_changed = has_changed || version != unit->gather.followed_version_;
    unit->gather.followed_version_ = version;
    // Other units keep the parameters of an earlier gather.
    if (unit->gather.state_ == UnitState::Sharded) {
      unit->gather.gathered_version_ = version;
    }
  }
  const bool has_kept = bucket.gather.group_ != nullptr &&
                        bucket.gather.group_->kept_from.matches(bucket.gather.gathered_from_);
  bucket.gather.source_ = has_kept ? &bucket.gather.group_->source : &bucket.gather.all_ranks_;
  if (has_changed) {
    streams_.follow_compute();
  }
  Stream& stream = streams_.messages();
  if (layout.world_size() == 1) {
    const GatherPiece& whole = bucket.gather.all_ranks_.pieces.front();
    const Timed timed(ledger_, stream, Work::Cast, bucket.numbers());
    packer_.cast(stream, whole.cast_plan, nullptr, bucket.flat_shard(), slot.data(), 1.0);
    ledger_.counters().copied_bytes += layout.shard_bytes() + layout.gather_bytes();
    stream.record(*whole.gathered);
  } else {
    gather_from_ranks(bucket, slot);
  }
  bucket.gather.issue_.refused = 0;
  bucket.gather.is_unused_ = true;
}

// Casts and sends the pieces one after the other. Note [gather inputs] says where casts write, and
// Note [pieces] which streams they use.
void Gatherer::gather_from_ranks(Bucket& bucket, Slot& slot) {
  const UnitLayout& layout = bucket.layout;
  const bool in_pieces = bucket.gather.is_in_pieces();
  const bool in_place = gathers_in_place(bucket);
  const bool casts = layout.needs_cast() && !bucket.gather.source().is_of_group() &&
                     (in_place || !bucket.gather.cast_from_.matches(bucket.gather.gathered_from_));
  const GatherSource& source = bucket.gather.source();
  const Range range(device_, bucket.ranges.all_gather, source.bytes);
  order_before_gather(bucket);
  Stream& before = streams_.before(in_pieces);
  Stream& after = streams_.after(in_pieces);
  if (in_place) {
    streams_.order_after(before, streams_.messages(), source.label);  // which wait for the slot
  }
  for (std::size_t i = 0; i < source.pieces.size(); ++i) {
    const GatherPiece& piece = source.pieces[i];
    const bool uses_half = in_pieces && piece.plan.packed_bytes > 0;
    const Output output{static_cast<char*>(slot.data()),
                        in_pieces ? staging_.half_of(i) : staging_.data()};
    if (uses_half) {
      staging_.wait_for_half(in_place ? before : streams_.messages(), i, source.label);
    }
    if (casts) {
      cast(bucket, piece, output, before);
      streams_.order_after(streams_.messages(), before, source.label);
    }
    gather_piece(bucket, i, output);
    if (uses_half) {
      staging_.release_half(after, i);
    }
    after.record(*piece.gathered);
  }
  if (casts) {
    ledger_.counters().copied_bytes += layout.shard_bytes() + layout.gather_bytes();
    bucket.gather.cast_from_ = bucket.gather.gathered_from_;
  }
}

void Gatherer::order_before_gather(const Bucket& bucket) {
  if (bucket.gather.is_in_pieces()) {
    // Casts overwrite a kept input, which the bucket's last gather has read.
    Stream& before = streams_.before(/*in_pieces=*/true);
    streams_.order_after_compute(before);
    before.wait(*bucket.gather.all_ranks_.last_piece().gathered, bucket.gather.all_ranks_.label);
  } else if (streams_.is_any_in_pieces() &&
             bucket.gather.source().pieces.front().plan.packed_bytes > 0) {
    staging_.wait_for_both(streams_.messages(), bucket.gather.source().label);
  }
}

// See Note [gather plans].
void Gatherer::gather_piece(const Bucket& bucket, std::size_t number, const Output& output) {
  const GatherPiece& piece = bucket.gather.source().pieces[number];
  send(bucket, number, output);
  Stream& after = streams_.after(bucket.gather.is_in_pieces());
  streams_.order_after(after, streams_.messages(), bucket.gather.source().label);
  if (piece.plan.packed_bytes > 0) {
    const Timed timed(ledger_, after, Work::Unpack, bucket.numbers());
    packer_.unpack(after, piece.plan.unpack, output.staging, output.slot);
    ledger_.counters().copied_bytes +=
        2 * piece.plan.packed_bytes * static_cast<std::size_t>(piece.plan.unpack.world_size);
  }
}

void Gatherer::send(const Bucket& bucket, std::size_t number, const Output& output) {
  const GatherSource& source = bucket.gather.source();
  const GatherPiece& piece = source.pieces[number];
  Stream& stream = streams_.messages();
  const Sending sending =
      announcer_.announce(bucket, {source.op, lane_, source.communicator, source.label, number,
                                   piece.bytes, DType::Bytes, bucket.gather.issue_});
  UserCollective* const hook = gather_hook_of(bucket);
  set_parts(bucket, piece.plan, output);
  if (hook == nullptr && parts_.size() > 1) {
    source.communicator.all_gather_parts(stream, parts_);
    return;
  }
  for (const GatherPart& part : parts_) {
    if (hook != nullptr) {
      gather_by_hook(*hook, stream, bucket.layout, piece.part, part);
    } else {
      source.communicator.all_gather(stream, part.input, part.output, part.bytes);
    }
  }
}

// Sets the messages of a piece.
void Gatherer::set_parts(const Bucket& bucket, const GatherPlan& plan, const Output& output) {
  const GatherSource& source = bucket.gather.source();
  const auto rank = static_cast<std::size_t>(source.communicator.rank());
  const bool in_place = gathers_in_place(bucket);
  const auto* const inputs = static_cast<const char*>(input_of(bucket));
  const auto add = [&](std::size_t offset, char* into, std::size_t bytes) {
    parts_.push_back({in_place ? into + rank * bytes : inputs + offset, into, bytes});
  };
  parts_.clear();
  for (const GatherMessage& message : plan.direct) {
    add(message.source_offset, output.slot + message.destination_offset, message.bytes);
  }
  if (plan.packed_bytes > 0) {
    add(plan.packed_offset, output.staging, plan.packed_bytes);
  }
}

// The memory that the bucket's messages are sent from, unless they are gathered in place.
const void* Gatherer::input_of(const Bucket& bucket) {
  return bucket.gather.source().is_of_group() ? bucket.gather.group_->memory.get()
         : bucket.layout.needs_cast()         ? bucket.gather.input_.get()
                                              : bucket.flat_shard();
}

// Whether shards are cast into their place in the output.
bool Gatherer::gathers_in_place(const Bucket& bucket) {
  return bucket.layout.needs_cast() && !bucket.gather.source().is_of_group() &&
         bucket.gather.input_ == nullptr;
}

void Gatherer::cast(const Bucket& bucket, const GatherPiece& piece, const Output& output,
                    Stream& stream) {
  const Timed timed(ledger_, stream, Work::Cast, bucket.numbers());
  const void* const shard = bucket.flat_shard();
  if (!gathers_in_place(bucket)) {
    packer_.cast(stream, piece.cast_plan, nullptr, shard, bucket.gather.input_.get(), 1.0);
    return;
  }
  if (!piece.cast_into_slot.entries.empty()) {
    packer_.cast(stream, piece.cast_into_slot, nullptr, shard, output.slot, 1.0);
  }
  if (!piece.cast_into_staging.entries.empty()) {
    packer_.cast(stream, piece.cast_into_staging, nullptr, shard, output.staging, 1.0);
  }
}

// - Use and release

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

// Pieces arrive in order. The unit does not wait for pieces after its last one.
void Gatherer::wait_for_gather(Unit& unit) {
  Bucket& bucket = *unit.bucket;
  const GatherSource& source = bucket.gather.source();
  ledger_.wait(*source.last_piece(unit).gathered, source.label, Work::WaitForGather,
               bucket.numbers());
  if (UserCollective* const hook = gather_hook_of(bucket)) {
    try {
      hook->check();
    } catch (...) {
      discard_failed_gather(bucket);
      throw;
    }
  }
}

// The slot's contents are unknown, so the next use gathers again.
void Gatherer::discard_failed_gather(Bucket& bucket) {
  invalidate(bucket);
  for (Unit* unit : bucket.units) {
    if (unit->gather.state_ == UnitState::Gathering) {
      reshard(*unit);
    }
  }
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
    keep_group_shard(*unit.bucket, *slot);
    slots_.release(*slot, *unit.bucket);
  }
}

void Gatherer::reshard_speculative(Bucket& bucket) {
  for (Unit* unit : bucket.units) {
    if (unit->gather.is_speculative_) {
      reshard(*unit);
    }
  }
}

}  // namespace fsdp
