#include "core/bucket.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

std::string name_of(const std::vector<Unit*>& units) {
  return units.size() == 1 ? units.front()->name
                           : units.front()->name + " to " + units.back()->name;
}

std::uint64_t identity_of(const std::string& name, const UnitLayout& layout) {
  std::uint64_t hash = mix(name.size(), static_cast<std::uint64_t>(layout.reduce_dtype()));
  for (const char character : name) {
    hash = mix(hash, static_cast<unsigned char>(character));
  }
  for (const ParamSpec& param : layout.params()) {
    hash = mix(hash, static_cast<std::uint64_t>(param.param_dtype));
  }
  return hash;
}

std::string label_of(const char* what, const std::vector<Unit*>& units) {
  return detail::concat(what, units.size() == 1 ? " of unit '" : " of units '", name_of(units),
                        "'");
}

// The lanes of the units' mesh, which is the same for all of them.
Lanes& mesh_of(const std::vector<Unit*>& units, Lanes& lanes) {
  return lanes.of_mesh(units.front()->mesh);
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

bool are_adjacent(const std::vector<Unit*>& units, const FlatMemory& flat) {
  const char* place = first_of(units, flat);
  for (const Unit* unit : units) {
    const std::size_t bytes = flat.bytes(unit->layout);
    if (bytes > 0 && (unit->port.*flat.address)() != place) {
      return false;
    }
    place += bytes;
  }
  return true;
}

void move_into(const std::vector<Unit*>& units, const FlatMemory& flat,
               const std::shared_ptr<void>& memory) {
  auto* place = static_cast<char*>(memory.get());
  for (Unit* unit : units) {
    const std::size_t bytes = flat.bytes(unit->layout);
    if (bytes > 0) {
      (unit->port.*flat.move)(std::shared_ptr<void>(memory, place));
    }
    place += bytes;
  }
}

std::shared_ptr<void> allocate_gradients(const UnitLayout& layout, Device& device) {
  const std::size_t bytes = kGradients.bytes(layout);
  return layout.is_offloaded() ? device.allocate_on_host(bytes) : device.allocate(bytes);
}

std::shared_ptr<void> allocate_shards(const UnitLayout& layout, Communicator& communicator,
                                      Device& device) {
  const std::size_t bytes = kShards.bytes(layout);
  return layout.is_offloaded() ? device.allocate_on_host(bytes)
                               : communicator.allocate_in_step(device, bytes, BufferUse::Shard);
}

// See Note [moving shards].
void make_adjacent(const std::vector<Unit*>& units, const UnitLayout& layout, Lanes& lanes) {
  if (!are_adjacent(units, kShards)) {
    Communicator& communicator = mesh_of(units, lanes).gather.communicator();
    move_into(units, kShards, allocate_shards(layout, communicator, *lanes.device));
  }
  if (!are_adjacent(units, kGradients)) {
    move_into(units, kGradients, allocate_gradients(layout, *lanes.device));
  }
}

ReducePiece reduction_of(const UnitLayout& layout, const LayoutPart& part, Packer& packer) {
  ReducePiece piece;
  piece.part = part;
  piece.pack_plan = layout.pack_plan(part);
  piece.finish_plan = layout.finish_plan(part);
  piece.first_trainable = layout.first_trainable(part);
  piece.gradient_offset =
      part.is_of_rows() ? part.first_row * layout.params()[part.first].row_numel : 0;
  piece.segment_offset = layout.first_gradient(part);
  const std::vector<DType> dtypes = layout.unsharded_grad_dtypes();
  for (std::size_t i = 0; i < piece.pack_plan.entries.size(); ++i) {
    const DType dtype = dtypes[piece.first_trainable + i];
    if (std::count(piece.gradient_dtypes.begin(), piece.gradient_dtypes.end(), dtype) == 0) {
      piece.gradient_dtypes.push_back(dtype);
    }
  }
  packer.prepare(piece.pack_plan);
  packer.prepare(piece.finish_plan);
  return piece;
}

std::vector<ReducePiece> reductions_of(const UnitLayout& layout, std::size_t max_message_bytes,
                                       Packer& packer) {
  std::vector<ReducePiece> pieces;
  for (const LayoutPart& part : reduce_parts(layout, max_message_bytes)) {
    pieces.push_back(reduction_of(layout, part, packer));
  }
  return pieces;
}

// Null for the group of all ranks. All units of a bucket have the same.
Communicator* group_of(const std::vector<Unit*>& units, Lanes& lanes) {
  const int ranks = units.front()->reshard_group;
  return ranks == 0 ? nullptr : &mesh_of(units, lanes).group_of(ranks).gather.communicator();
}

BucketBuffers buffers_of(const UnitLayout& layout, const std::vector<Unit*>& units, Lanes& lanes) {
  const Communicator* group = group_of(units, lanes);
  const GatherBy by = mesh_of(units, lanes).gather.communicator().gather_by();
  return buffers_of(
      layout, by, units.front()->max_message_bytes,
      group == nullptr ? SmallerGroup{} : SmallerGroup{group->size(), group->gather_by()});
}

std::unique_ptr<GroupShard> group_shard_of(const UnitLayout& layout,
                                           const std::vector<Unit*>& units, Lanes& lanes) {
  Communicator* communicator = group_of(units, lanes);
  if (communicator == nullptr) {
    return nullptr;
  }
  const std::string what = detail::concat("the all-gather over ", communicator->size(), " ranks");
  return std::make_unique<GroupShard>(*communicator, layout, units, label_of(what.c_str(), units),
                                      lanes);
}

}  // namespace

Bucket::Bucket(int bucket_number, std::vector<Unit*> members, Lanes& lanes)
    : number(bucket_number),
      units(std::move(members)),
      name(name_of(units)),
      layout(layout_of(units)),
      identity(identity_of(name, layout)),
      mesh(lanes.mesh(units.front()->mesh)),
      reduces_over(mesh_of(units, lanes).reduce.communicator()),
      buffers(buffers_of(layout, units, lanes)),
      all_ranks(Collective::AllGather, mesh_of(units, lanes).gather.communicator(), layout, units,
                label_of("the all-gather", units), lanes),
      reductions(reductions_of(layout, units.front()->max_message_bytes, *lanes.packer)),
      gradient_dtypes(layout.unsharded_grad_dtypes()),
      group(group_shard_of(layout, units, lanes)),
      accumulated(*this),
      gradients(layout.trainable_count(), nullptr),
      gradients_of_dtype(layout.trainable_count(), nullptr),
      finish_modes(layout.trainable_count(), CastMode::Write),
      packed(lanes.device->new_event()),
      reduced(lanes.device->new_event()),
      reduce_label(label_of("the reduce-scatter", units)),
      all_reduce_label(label_of("the all-reduce over replicas", units)),
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
  make_adjacent(units, layout, lanes);
}

std::size_t Bucket::shard_bytes() const { return kShards.bytes(layout); }
std::size_t Bucket::gradient_bytes() const { return kGradients.bytes(layout); }

void Bucket::move_shards(const std::shared_ptr<void>& memory) { move_into(units, kShards, memory); }

void Bucket::move_gradients(const std::shared_ptr<void>& memory) {
  move_into(units, kGradients, memory);
}

void Bucket::renew_gradients(Device& device) {
  const std::shared_ptr<void> memory = allocate_gradients(layout, device);
  auto* place = static_cast<char*>(memory.get());
  for (Unit* unit : units) {
    unit->port.renew_gradient(std::shared_ptr<void>(memory, place));
    place += kGradients.bytes(unit->layout);
  }
}

const void* Bucket::flat_shard() const { return first_of(units, kShards); }

void* Bucket::flat_gradient() const { return first_of(units, kGradients); }

std::size_t Bucket::segment_bytes() const {
  return static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.reduce_dtype());
}

std::size_t Bucket::reduce_input_bytes(const ReducePiece& piece) const {
  return static_cast<std::size_t>(piece.pack_plan.segment_numel) *
         static_cast<std::size_t>(layout.world_size()) * itemsize(layout.reduce_dtype());
}

std::size_t Bucket::reduce_input_bytes() const {
  return segment_bytes() * static_cast<std::size_t>(layout.world_size());
}

std::size_t Bucket::buffer_bytes() const {
  return (home != nullptr ? home->bytes : 0) +
         (gather_input != nullptr ? buffers.gather_input : 0) +
         (group != nullptr && group->memory != nullptr ? buffers.group_shard : 0) +
         accumulated.bytes();
}

std::vector<BucketUse> uses_of(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::vector<BucketUse> uses;
  uses.reserve(buckets.size());
  for (const auto& bucket : buckets) {
    uses.push_back(bucket->use());
  }
  return uses;
}

bool has_several_meshes(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  return std::any_of(buckets.begin(), buckets.end(),
                     [](const auto& bucket) { return bucket->mesh != nullptr; });
}

}  // namespace fsdp
