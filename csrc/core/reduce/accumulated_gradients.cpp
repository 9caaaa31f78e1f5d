#include "core/reduce/accumulated_gradients.h"

#include <algorithm>

#include "core/reduce/bucket_reduction.h"

namespace fsdp {

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
