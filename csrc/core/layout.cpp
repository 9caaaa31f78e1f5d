#include "core/layout.h"

#include <algorithm>
#include <utility>

#include "core/align.h"
#include "core/check.h"

namespace fsdp {
namespace {

// Elements whose multiples are aligned to 16 bytes in both dtypes: gradients have the same
// element offsets on the wire and in the flat gradient.
std::int64_t common_alignment(DType a, DType b) {
  return static_cast<std::int64_t>(kAlignment / std::min(itemsize(a), itemsize(b)));
}

}  // namespace

UnitLayout::UnitLayout(std::vector<ParamSpec> params, int world_size, DType grad_dtype,
                       DType reduce_dtype, std::size_t direct_bytes)
    : params_(std::move(params)),
      world_size_(world_size),
      grad_dtype_(grad_dtype),
      reduce_dtype_(reduce_dtype),
      direct_bytes_(direct_bytes) {
  FSDP_CHECK(world_size_ >= 1, "a layout expects a world size of at least 1 but got ", world_size_);
  const std::int64_t grad_alignment = common_alignment(grad_dtype_, reduce_dtype_) *
                                      (world_size_ == 1 ? kRegionAlignment / kAlignment : 1);
  placements_.reserve(params_.size());
  for (const ParamSpec& param : params_) {
    FSDP_CHECK(param.rows >= 0 && param.row_numel >= 0, "parameter '", param.name,
               "' expects non-negative sizes but got ", param.rows, " rows of ", param.row_numel);
    FSDP_CHECK((param.shard_dtype == DType::Bytes) == (param.param_dtype == DType::Bytes),
               "parameter '", param.name, "' cannot be cast from ", fsdp::name(param.shard_dtype),
               " to ", fsdp::name(param.param_dtype));
    FSDP_CHECK(!param.trainable || param.shard_dtype == grad_dtype_, "trainable parameter '",
               param.name, "' expects dtype ", fsdp::name(grad_dtype_),
               ", as its unit has, but got ", fsdp::name(param.shard_dtype));
    ParamPlacement place;
    place.numel = param.rows * param.row_numel;
    place.chunk_rows = (param.rows + world_size_ - 1) / world_size_;
    place.chunk_numel = place.chunk_rows * param.row_numel;
    if (param.trainable) {
      trainable_count_ += 1;
      place.grad_offset = grad_numel_;
      grad_numel_ =
          (grad_numel_ + place.chunk_numel + grad_alignment - 1) / grad_alignment * grad_alignment;
    }
    needs_cast_ = needs_cast_ || param.shard_dtype != param.param_dtype;
    placements_.push_back(place);
    place_chunk(placements_.size() - 1);
    if (large_count_ + 1 == placements_.size() && region_bytes(large_count_) >= direct_bytes_) {
      large_count_ += 1;
      large_bytes_ = gather_bytes_;
    }
  }
}

UnitLayout UnitLayout::joined(const std::vector<const UnitLayout*>& layouts) {
  std::vector<ParamSpec> params;
  const UnitLayout* like = layouts.front();
  for (const UnitLayout* layout : layouts) {
    params.insert(params.end(), layout->params_.begin(), layout->params_.end());
    like = like->trainable_count_ == 0 ? layout : like;
  }
  return {std::move(params), like->world_size_, like->grad_dtype_, like->reduce_dtype_,
          like->direct_bytes_};
}

void UnitLayout::place_chunk(std::size_t param) {
  // On one rank all three are one buffer, if nothing is cast.
  const std::size_t alignment = world_size_ == 1 ? kRegionAlignment : kAlignment;
  ParamPlacement& place = placements_[param];
  const auto chunk = static_cast<std::size_t>(place.chunk_numel);
  place.shard_offset = shard_bytes_;
  shard_bytes_ = align_up(shard_bytes_ + chunk * itemsize(params_[param].shard_dtype), alignment);
  place.gather_offset = gather_bytes_;
  gather_bytes_ = align_up(gather_bytes_ + chunk * itemsize(params_[param].param_dtype), alignment);
  place.unsharded_offset = unsharded_bytes_;
  unsharded_bytes_ = align_up(unsharded_bytes_ + region_bytes(param), kRegionAlignment);
}

std::size_t UnitLayout::region_bytes(std::size_t param) const {
  return static_cast<std::size_t>(world_size_) *
         static_cast<std::size_t>(placements_[param].chunk_numel) *
         itemsize(params_[param].param_dtype);
}

std::int64_t UnitLayout::first_row(std::size_t param, int rank) const {
  return std::min(params_.at(param).rows, placements_.at(param).chunk_rows * rank);
}

std::int64_t UnitLayout::row_count(std::size_t param, int rank) const {
  const std::int64_t first = first_row(param, rank);
  return std::min(placements_[param].chunk_rows, params_[param].rows - first);
}

PackPlan UnitLayout::pack_plan() const {
  PackPlan plan;
  plan.segment_numel = grad_numel_;
  plan.world_size = world_size_;
  for (const ParamPlacement& place : placements_) {
    if (place.grad_offset >= 0) {
      plan.entries.push_back({place.numel, place.chunk_numel, place.grad_offset});
    }
  }
  return plan;
}

// See Note [gather plans].
GatherPlan UnitLayout::gather_plan(GatherBy by) const {
  GatherPlan plan;
  const std::size_t direct_count = by == GatherBy::Parameter ? params_.size()
                                   : by == GatherBy::Size    ? large_count_
                                                             : 0;
  plan.packed_offset = by == GatherBy::Size ? large_bytes_ : 0;
  plan.packed_bytes = gather_bytes_ - plan.packed_offset;
  plan.unpack.segment_bytes = plan.packed_bytes;
  plan.unpack.world_size = world_size_;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamPlacement& place = placements_[i];
    const std::size_t chunk =
        static_cast<std::size_t>(place.chunk_numel) * itemsize(params_[i].param_dtype);
    if (chunk == 0) {
      continue;
    }
    if (i < direct_count) {
      plan.direct.push_back({place.gather_offset, place.unsharded_offset, chunk});
    } else {
      plan.unpack.entries.push_back(
          {chunk, place.gather_offset - plan.packed_offset, place.unsharded_offset, 1});
    }
  }
  // One that is alone would be copied from staging as it is.
  if (plan.unpack.entries.size() == 1) {
    const UnpackEntry& alone = plan.unpack.entries.front();
    plan.direct.push_back(
        {plan.packed_offset + alone.source_offset, alone.destination_offset, alone.chunk_bytes});
    plan.unpack.entries.clear();
  }
  if (plan.unpack.entries.empty()) {
    plan.packed_bytes = 0;
  }
  return plan;
}

CastPlan UnitLayout::finish_plan() const {
  CastPlan plan;
  for (const ParamPlacement& place : placements_) {
    if (place.grad_offset >= 0) {
      const auto offset = static_cast<std::size_t>(place.grad_offset);
      plan.entries.push_back({offset * itemsize(reduce_dtype_), offset * itemsize(grad_dtype_),
                              place.chunk_numel, reduce_dtype_, grad_dtype_});
    }
  }
  return plan;
}

CastPlan UnitLayout::shard_to_gather_plan() const {
  CastPlan plan;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamPlacement& place = placements_[i];
    if (place.chunk_numel == 0) {
      continue;
    }
    const CastEntry entry{place.shard_offset, place.gather_offset, place.chunk_numel,
                          params_[i].shard_dtype, params_[i].param_dtype};
    // Neighbours without a gap between them become one run.
    if (!plan.entries.empty()) {
      CastEntry& last = plan.entries.back();
      const auto run = static_cast<std::size_t>(last.numel);
      if (last.source_dtype == entry.source_dtype &&
          last.destination_dtype == entry.destination_dtype &&
          last.source_offset + run * itemsize(last.source_dtype) == entry.source_offset &&
          last.destination_offset + run * itemsize(last.destination_dtype) ==
              entry.destination_offset) {
        last.numel += entry.numel;
        continue;
      }
    }
    plan.entries.push_back(entry);
  }
  return plan;
}

}  // namespace fsdp
