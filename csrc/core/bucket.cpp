#include "core/bucket.h"

#include <utility>

#include "core/check.h"

namespace fsdp {
namespace {

std::string name_of(const std::vector<Unit*>& units) {
  return units.size() == 1 ? units.front()->name
                           : units.front()->name + " to " + units.back()->name;
}

std::string label_of(const char* what, const std::vector<Unit*>& units) {
  return detail::concat(what, units.size() == 1 ? " of unit '" : " of units '", name_of(units),
                        "'");
}

UnitLayout layout_of(const std::vector<Unit*>& units) {
  std::vector<const UnitLayout*> layouts;
  layouts.reserve(units.size());
  for (const Unit* unit : units) {
    layouts.push_back(&unit->layout);
  }
  return UnitLayout::joined(layouts);
}

// One piece behind the other, in the order of the units.
using Bytes = std::size_t (*)(const UnitLayout&);
using Address = void* (*)(UnitPort&);
using MoveTo = void (UnitPort::*)(std::shared_ptr<void>);

bool are_neighbours(const std::vector<Unit*>& units, Bytes bytes, Address address) {
  for (std::size_t i = 1; i < units.size(); ++i) {
    const Unit& before = *units[i - 1];
    if (static_cast<char*>(address(before.port)) + bytes(before.layout) !=
        address(units[i]->port)) {
      return false;
    }
  }
  return true;
}

void move_behind_each_other(const std::vector<Unit*>& units, Bytes bytes, MoveTo move,
                            const std::shared_ptr<void>& memory) {
  auto* place = static_cast<char*>(memory.get());
  for (Unit* unit : units) {
    (unit->port.*move)(std::shared_ptr<void>(memory, place));
    place += bytes(unit->layout);
  }
}

std::size_t shard_bytes(const UnitLayout& layout) { return layout.shard_bytes(); }
void* shard_address(UnitPort& port) { return port.flat_shard(); }

std::size_t gradient_bytes(const UnitLayout& layout) {
  return static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.grad_dtype());
}
void* gradient_address(UnitPort& port) { return port.flat_gradient(); }

// See Note [moving shards].
void make_neighbours(const std::vector<Unit*>& units, const UnitLayout& layout, Lanes& lanes) {
  if (!are_neighbours(units, shard_bytes, shard_address)) {
    move_behind_each_other(units, shard_bytes, &UnitPort::move_shard,
                           lanes.gather.allocate(layout.shard_bytes(), BufferUse::Shard));
  }
  if (gradient_bytes(layout) > 0 && !are_neighbours(units, gradient_bytes, gradient_address)) {
    move_behind_each_other(units, gradient_bytes, &UnitPort::move_gradient,
                           lanes.device->allocate(gradient_bytes(layout)));
  }
}

}  // namespace

Bucket::Bucket(int bucket_number, std::vector<Unit*> members, Lanes& lanes)
    : number(bucket_number),
      units(std::move(members)),
      name(name_of(units)),
      layout(layout_of(units)),
      cast_plan(layout.shard_to_gather_plan()),
      gather_plan(layout.gather_plan(lanes.gather.communicator().gather_by())),
      pack_plan(layout.pack_plan()),
      finish_plan(layout.finish_plan()),
      gathered(lanes.device->new_event()),
      accumulated_params(layout.trainable_count(), 0),
      gradients(layout.trainable_count(), nullptr),
      finish_modes(layout.trainable_count(), CastMode::Write),
      packed(lanes.device->new_event()),
      reduced(lanes.device->new_event()),
      gather_label(label_of("the all-gather", units)),
      reduce_label(label_of("the reduce-scatter", units)) {
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
    if (unit.layout.trainable_count() > 0) {
      gradient_dtype = unit.port.gradient_dtype();
    }
  }
  Packer& packer = *lanes.packer;
  packer.prepare(cast_plan);
  packer.prepare(gather_plan.unpack);
  packer.prepare(pack_plan);
  packer.prepare(finish_plan);
  make_neighbours(units, layout, lanes);
}

std::size_t Bucket::segment_bytes() const {
  return static_cast<std::size_t>(layout.grad_numel()) * itemsize(layout.reduce_dtype());
}

std::size_t Bucket::reduce_input_bytes() const {
  return segment_bytes() * static_cast<std::size_t>(layout.world_size());
}

std::size_t Bucket::buffer_bytes() const {
  return (home != nullptr ? home->bytes : 0) +
         (gather_input != nullptr ? layout.gather_bytes() : 0) +
         (accumulated != nullptr ? reduce_input_bytes() : 0);
}

}  // namespace fsdp
