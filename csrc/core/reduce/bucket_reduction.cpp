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

}  // namespace fsdp
