#include "core/reduce/bucket_reduction.h"

#include <algorithm>

#include "core/memory/memory_plan.h"
#include "core/units/bucket_names.h"

namespace fsdp {
namespace {

ReducePiece piece_of(const UnitLayout& layout, const LayoutPart& part, Packer& packer) {
  const std::int64_t gradient_offset =
      part.is_of_rows() ? part.first_row * layout.params()[part.first].row_numel : 0;
  ReducePiece piece{layout.reduce_plan(part), part, gradient_offset, {}};
  const std::vector<DType> dtypes = layout.unsharded_grad_dtypes();
  for (std::size_t i = 0; i < piece.pack.entries.size(); ++i) {
    const DType dtype = dtypes[piece.first_trainable + i];
    if (std::count(piece.gradient_dtypes.begin(), piece.gradient_dtypes.end(), dtype) == 0) {
      piece.gradient_dtypes.push_back(dtype);
    }
  }
  packer.prepare(piece.pack);
  packer.prepare(piece.finish);
  return piece;
}

std::vector<ReducePiece> pieces_of(const UnitLayout& layout, MessageLimits limits, Packer& packer) {
  std::vector<ReducePiece> pieces;
  for (const LayoutPart& part : reduce_parts(layout, limits)) {
    pieces.push_back(piece_of(layout, part, packer));
  }
  return pieces;
}

}  // namespace

// All units of a bucket have the same mesh and the same message_limits.
BucketReduction::BucketReduction(const UnitLayout& layout, const std::vector<Unit*>& units,
                                 Lanes& lanes)
    : label(label_of("the reduce-scatter", units)),
      all_reduce_label(label_of("the all-reduce over replicas", units)),
      layout_(layout),
      communicator_(lanes.of_mesh(units.front()->mesh).reduce.communicator()),
      pieces_(pieces_of(layout, units.front()->message_limits, *lanes.packer)),
      gradient_dtypes_(layout.unsharded_grad_dtypes()),
      accumulated_(*this),
      gradients_(layout.trainable_count(), nullptr),
      gradients_of_dtype_(layout.trainable_count(), nullptr),
      finish_modes_(layout.trainable_count(), CastMode::Write),
      packed_(lanes.device->new_event()),
      reduced_(lanes.device->new_event()) {}

std::size_t BucketReduction::input_bytes() const {
  return static_cast<std::size_t>(layout_.grad_numel()) *
         static_cast<std::size_t>(layout_.world_size()) * itemsize(layout_.reduce_dtype());
}

std::size_t BucketReduction::input_bytes(const ReducePiece& piece) const {
  return static_cast<std::size_t>(piece.pack.segment_numel) *
         static_cast<std::size_t>(layout_.world_size()) * itemsize(layout_.reduce_dtype());
}

// - Accumulated gradients

AccumulatedGradients::AccumulatedGradients(const BucketReduction& reduction)
    : reduction_(reduction), since_(reduction.layout().trainable_count(), 0) {}

std::uint64_t AccumulatedGradients::since(const Unit& unit, std::size_t i) const {
  return since_[unit.first_trainable + i];
}

bool AccumulatedGradients::any_before(std::uint64_t packing) const {
  return std::any_of(since_.begin(), since_.end(),
                     [packing](std::uint64_t since) { return since != 0 && since < packing; });
}

void AccumulatedGradients::allocate(Device& device) {
  if (memory_ == nullptr) {
    memory_ = reduction_.communicator().allocate_alone(device, reduction_.input_bytes(),
                                                       BufferUse::Input);
  }
}

void AccumulatedGradients::begin(Device& device) {
  if (has_any_) {
    return;
  }
  allocate(device);
  device.fill(device.compute_stream(), memory_.get(), 0, reduction_.input_bytes());
  has_any_ = true;
}

void AccumulatedGradients::add(const Unit& unit, std::size_t i, std::uint64_t packing) {
  std::uint64_t& since = since_[unit.first_trainable + i];
  since = since != 0 ? since : packing;
}

void AccumulatedGradients::add_arrived(const std::vector<Unit*>& units, std::uint64_t packing) {
  for (const Unit* unit : units) {
    for (std::size_t i = 0; i < unit->gradients.count(); ++i) {
      if (unit->gradients.has_arrived(i)) {
        add(*unit, i, packing);
      }
    }
  }
  has_any_ = true;
}

void AccumulatedGradients::reset(Device& device, Stream& stream, const std::vector<Unit*>& units) {
  for (const Unit* unit : units) {
    const auto first = since_.begin() + static_cast<std::ptrdiff_t>(unit->first_trainable);
    std::fill(first, first + static_cast<std::ptrdiff_t>(unit->gradients.count()), 0);
  }
  has_any_ = std::any_of(since_.begin(), since_.end(), [](std::uint64_t since) { return since; });
  for (const Unit* unit : units) {
    if (has_any_) {
      fill_with_zeros(device, stream, *unit);
    }
  }
}

void AccumulatedGradients::reset() {
  std::fill(since_.begin(), since_.end(), 0);
  has_any_ = false;
}

char* AccumulatedGradients::piece(std::size_t number) const {
  const auto before = static_cast<std::size_t>(reduction_.pieces()[number].first_gradient) *
                      itemsize(reduction_.layout().reduce_dtype()) *
                      static_cast<std::size_t>(reduction_.layout().world_size());
  return static_cast<char*>(memory_.get()) + before;
}

std::vector<AccumulatedGradients::Part> AccumulatedGradients::parts(const Unit& unit) const {
  const std::size_t element = itemsize(reduction_.layout().reduce_dtype());
  const auto unit_begin = static_cast<std::int64_t>(unit.gradient_offset);
  const std::int64_t unit_end = unit_begin + unit.layout.grad_numel();
  std::vector<Part> parts;
  for (std::size_t i = 0; i < reduction_.pieces().size(); ++i) {
    const ReducePiece& reduced = reduction_.pieces()[i];
    const std::int64_t numel = reduced.pack.segment_numel;
    const std::int64_t begin = std::max(unit_begin, reduced.first_gradient);
    const std::int64_t end = std::min(unit_end, reduced.first_gradient + numel);
    if (begin < end) {
      const auto first = static_cast<std::size_t>(begin - reduced.first_gradient) * element;
      parts.push_back({piece(i) + first, end - begin, numel});
    }
  }
  return parts;
}

std::size_t AccumulatedGradients::bytes() const {
  return memory_ != nullptr ? reduction_.input_bytes() : 0;
}

void AccumulatedGradients::fill_with_zeros(Device& device, Stream& stream, const Unit& unit) const {
  const std::size_t element = itemsize(reduction_.layout().reduce_dtype());
  for (const Part& part : parts(unit)) {
    for (int rank = 0; rank < reduction_.layout().world_size(); ++rank) {
      device.fill(
          stream,
          static_cast<char*>(part.first) + static_cast<std::size_t>(rank * part.stride) * element,
          0, static_cast<std::size_t>(part.numel) * element);
    }
  }
}

}  // namespace fsdp
