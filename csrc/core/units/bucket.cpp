#include "core/units/bucket.h"

#include <algorithm>
#include <utility>

#include "base/mix.h"

namespace fsdp {
namespace {

// Ranks of another mesh have units with other names and sizes in place of these: other experts.
std::uint64_t identity_of(const std::vector<Unit*>& units, const std::string& name,
                          const UnitLayout& layout) {
  const bool is_of_all_ranks = units.front()->mesh == 0;
  std::uint64_t hash = mix(units.size(), static_cast<std::uint64_t>(layout.reduce_dtype()));
  if (is_of_all_ranks) {
    for (const char character : name) {
      hash = mix(hash, static_cast<unsigned char>(character));
    }
  }
  for (const Unit* unit : units) {
    hash = mix(hash, static_cast<std::uint64_t>(unit->number));
  }
  for (const ParamSpec& param : layout.params()) {
    const bool is_compared = is_of_all_ranks && param.trainable;
    hash = mix(hash, static_cast<std::uint64_t>(param.param_dtype));
    hash = mix(hash, static_cast<std::uint64_t>(is_compared ? param.rows * param.row_numel : 0));
  }
  return hash;
}

UnitLayout layout_of(const std::vector<Unit*>& units) {
  std::vector<const UnitLayout*> layouts;
  layouts.reserve(units.size());
  for (const Unit* unit : units) {
    layouts.push_back(&unit->layout);
  }
  return UnitLayout::joined(layouts);
}

// One of the two kinds of memory that the units of a bucket have side by side.
struct FlatMemory {
  std::size_t (*bytes)(const UnitLayout&);
  void* (UnitPort::*address)();
  void (UnitPort::*move)(std::shared_ptr<void>);
};

const FlatMemory kShards{[](const UnitLayout& layout) { return layout.shard_bytes(); },
                         &UnitPort::flat_shard, &UnitPort::move_shard};
const FlatMemory kGradients{[](const UnitLayout& layout) { return layout.gradient_bytes(); },
                            &UnitPort::flat_gradient, &UnitPort::move_gradient};

// The address of the first unit's memory that is not empty.
char* first_of(const std::vector<Unit*>& units, const FlatMemory& flat) {
  for (const Unit* unit : units) {
    if (flat.bytes(unit->layout) > 0) {
      return static_cast<char*>((unit->port.*flat.address)());
    }
  }
  return nullptr;
}

// Units whose gradients are lent (Note [lent gradients]) have no memory, and count as adjacent.
bool are_adjacent(const std::vector<Unit*>& units, const FlatMemory& flat) {
  const char* next = first_of(units, flat);
  const bool has_memory = next != nullptr;
  for (const Unit* unit : units) {
    const std::size_t bytes = flat.bytes(unit->layout);
    if (bytes > 0 && (unit->port.*flat.address)() != next) {
      return false;
    }
    next += has_memory ? bytes : 0;
  }
  return true;
}

void move_into(const std::vector<Unit*>& units, const FlatMemory& flat,
               const std::shared_ptr<void>& memory) {
  auto* next = static_cast<char*>(memory.get());
  for (Unit* unit : units) {
    const std::size_t bytes = flat.bytes(unit->layout);
    if (bytes > 0) {
      (unit->port.*flat.move)(std::shared_ptr<void>(memory, next));
    }
    next += bytes;
  }
}

std::shared_ptr<void> allocate_shards(const UnitLayout& layout, Communicator& communicator,
                                      Device& device) {
  const std::size_t bytes = kShards.bytes(layout);
  return layout.is_offloaded() ? device.allocate_on_host(bytes)
                               : communicator.allocate_alone(device, bytes, BufferUse::Shard);
}

std::shared_ptr<void> allocate_gradients(const UnitLayout& layout, Device& device, Stream& stream) {
  const std::size_t bytes = kGradients.bytes(layout);
  return layout.is_offloaded() ? device.allocate_on_host(bytes)
                               : device.allocate_for(stream, bytes);
}

// Gradients stay in the memory of an earlier bucket if they are adjacent there.
void make_gradients_adjacent(const std::vector<Unit*>& units, const UnitLayout& layout,
                             Device& device) {
  const bool moves = !are_adjacent(units, kGradients);
  if (moves) {
    move_into(units, kGradients, allocate_gradients(layout, device, device.compute_stream()));
  }
  const bool has_memory = first_of(units, kGradients) != nullptr;
  for (Unit* unit : units) {
    if (moves || !has_memory || !unit->gradient_stream.has_value()) {
      unit->gradient_stream = device.compute_stream().native_handle();
    }
  }
}

// See Note [moving shards].
void make_adjacent(const std::vector<Unit*>& units, const UnitLayout& layout,
                   Communicator& communicator, Device& device) {
  if (!are_adjacent(units, kShards)) {
    move_into(units, kShards, allocate_shards(layout, communicator, device));
  }
  make_gradients_adjacent(units, layout, device);
}

BucketBuffers buffers_of(const UnitLayout& layout, const std::vector<Unit*>& units,
                         const BucketGather& gather) {
  SmallerGroup smaller;
  if (gather.group() != nullptr) {
    const Communicator& group = gather.group()->source.communicator;
    smaller = {group.size(), group.traits().gather_by};
  }
  return buffers_of(layout, gather.all_ranks().communicator.traits().gather_by,
                    units.front()->message_limits, smaller);
}

}  // namespace

Bucket::Bucket(int bucket_number, std::vector<Unit*> members, Lanes& lanes)
    : number(bucket_number),
      units(std::move(members)),
      name(name_of(units)),
      layout(layout_of(units)),
      identity(identity_of(units, name, layout)),
      mesh(lanes.mesh(units.front()->mesh)),
      gather(layout, units, lanes),
      reduction(layout, units, lanes),
      buffers(buffers_of(layout, units, gather)),
      ranges(units.size() == 1 && units.front()->number == 0 ? "" : name) {}

void Bucket::place_units(Lanes& lanes) {
  std::size_t unsharded = 0;
  std::size_t trainable = 0;
  std::size_t gradient = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    Unit& unit = *units[i];
    unit.bucket = this;
    unit.position = i;
    unit.unsharded_offset = unsharded;
    unit.first_trainable = trainable;
    unit.gradient_offset = gradient;
    unsharded += unit.layout.unsharded_bytes();
    gradient += static_cast<std::size_t>(unit.layout.grad_numel());
    trainable += unit.layout.trainable_count();
  }
  make_adjacent(units, layout, gather.all_ranks().communicator, *lanes.device);
}

std::size_t Bucket::shard_bytes() const { return kShards.bytes(layout); }
std::size_t Bucket::gradient_bytes() const { return kGradients.bytes(layout); }

void Bucket::move_shards(const std::shared_ptr<void>& memory) { move_into(units, kShards, memory); }

void Bucket::move_gradients(const std::shared_ptr<void>& memory) {
  move_into(units, kGradients, memory);
}

bool Bucket::uses_gradient_memory() const {
  return std::any_of(units.begin(), units.end(),
                     [](const Unit* unit) { return unit->port.uses_gradient_memory(); });
}

void Bucket::lend_gradients(void* stream) {
  for (Unit* unit : units) {
    unit->port.set_gradient_memory(nullptr);
    unit->gradient_stream = stream;
  }
}

std::shared_ptr<void> Bucket::allocate_gradients(Device& device, Stream& stream) const {
  return fsdp::allocate_gradients(layout, device, stream);
}

void Bucket::renew_gradients(const std::shared_ptr<void>& memory) {
  const bool has_lent = has_lent_gradients();
  auto* next = static_cast<char*>(memory.get());
  for (Unit* unit : units) {
    const std::shared_ptr<void> part(memory, next);
    if (has_lent && !unit->port.has_held_gradients()) {
      unit->port.set_gradient_memory(part);
    } else {
      unit->port.renew_gradient(part);
    }
    next += kGradients.bytes(unit->layout);
  }
}

const void* Bucket::flat_shard() const { return first_of(units, kShards); }

void* Bucket::flat_gradient() const { return first_of(units, kGradients); }

std::size_t Bucket::buffer_bytes() const {
  return gather.buffer_bytes(buffers) + reduction.accumulated().bytes();
}

BucketUse Bucket::use() const {
  const bool reads_whole_output = std::any_of(
      units.begin(), units.end(), [](const Unit* unit) { return unit->reads_whole_output; });
  return {buffers, units.front()->reshard_after_forward, reads_whole_output};
}

std::vector<BucketUse> uses_of(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::vector<BucketUse> uses;
  uses.reserve(buckets.size());
  for (const auto& bucket : buckets) {
    uses.push_back(bucket->use());
  }
  return uses;
}

bool have_accumulated(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  return std::any_of(buckets.begin(), buckets.end(),
                     [](const auto& bucket) { return bucket->reduction.accumulated().any(); });
}

bool has_several_meshes(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  return std::any_of(buckets.begin(), buckets.end(),
                     [](const auto& bucket) { return bucket->mesh != nullptr; });
}

}  // namespace fsdp
