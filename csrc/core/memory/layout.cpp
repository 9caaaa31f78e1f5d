#include "core/memory/layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/align.h"
#include "base/check.h"

namespace fsdp {
namespace {

// In elements, aligned to 16 bytes in both dtypes: if all gradients have one dtype, each has the
// same element offset on the wire and in the flat gradient.
std::int64_t common_alignment(DType a, DType b) {
  return static_cast<std::int64_t>(kAlignment / std::min(itemsize(a), itemsize(b)));
}

std::int64_t padded_to(std::int64_t numel, std::int64_t multiple) {
  return (numel + multiple - 1) / multiple * multiple;
}

std::int64_t chunk_rows_of(const ParamSpec& param, int world_size) {
  return (param.rows + world_size - 1) / world_size;
}

// Of the unsharded parameter with the padding of its chunks.
std::size_t region_bytes_of(const ParamSpec& param, int world_size) {
  if (!param.gathered) {
    return 0;
  }
  return static_cast<std::size_t>(world_size) *
         static_cast<std::size_t>(chunk_rows_of(param, world_size) * param.row_numel) *
         itemsize(param.param_dtype);
}

// See Note [gather plans].
bool is_large(const ParamSpec& param, int world_size, std::size_t direct_bytes) {
  return param.gathered && param.runs == 1 && region_bytes_of(param, world_size) >= direct_bytes;
}

void check_param(const ParamSpec& param, int world_size, DType grad_dtype) {
  FSDP_CHECK(param.runs == 1 || param.rows == world_size, "Parameter '", param.name,
             "' has chunks of ", param.runs, " runs and ", param.rows,
             " rows. Such chunks count as one row of each of ", world_size, " ranks.");
  FSDP_CHECK(param.rows >= 0 && param.row_numel >= 0, "Parameter '", param.name, "' has ",
             param.rows, " rows of ", param.row_numel, " elements. Sizes must be 0 or more.");
  FSDP_CHECK(
      !param.gathered || (param.shard_dtype == DType::Bytes) == (param.param_dtype == DType::Bytes),
      "Parameter '", param.name, "' cannot be cast from ", name(param.shard_dtype), " to ",
      name(param.param_dtype), ". Only floating-point parameters can be cast.");
  const bool is_of_grad_dtype = param.grad_dtype.has_value() || param.shard_dtype == grad_dtype ||
                                param.param_dtype == grad_dtype;
  FSDP_CHECK(!param.trainable || is_of_grad_dtype, "Trainable parameter '", param.name,
             "' has dtype ", name(param.shard_dtype), ". It needs ", name(grad_dtype),
             ", the dtype of its unit's gradients.");
}

}  // namespace

std::vector<std::size_t> layout_order(const std::vector<ParamSpec>& params, int world_size,
                                      std::size_t direct_bytes) {
  std::vector<std::size_t> order(params.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto others = std::stable_partition(order.begin(), order.end(), [&](std::size_t i) {
    return is_large(params[i], world_size, direct_bytes);
  });
  std::stable_partition(others, order.end(), [&](std::size_t i) { return params[i].runs == 1; });
  return order;
}

UnitLayout::UnitLayout(std::vector<ParamSpec> params, int world_size, DType grad_dtype,
                       DType reduce_dtype, std::size_t direct_bytes, bool is_offloaded)
    : params_(std::move(params)),
      world_size_(world_size),
      grad_dtype_(grad_dtype),
      reduce_dtype_(reduce_dtype),
      direct_bytes_(direct_bytes),
      is_offloaded_(is_offloaded),
      needs_cast_(is_offloaded) {
  FSDP_CHECK(world_size_ >= 1, "A layout cannot have world size ", world_size_,
             ". It needs at least 1.");
  const std::int64_t grad_alignment = common_alignment(grad_dtype_, reduce_dtype_) *
                                      (world_size_ == 1 ? kRegionAlignment / kAlignment : 1);
  placements_.reserve(params_.size());
  for (const ParamSpec& param : params_) {
    check_param(param, world_size_, grad_dtype_);
    ParamPlacement place;
    place.numel = param.rows * param.row_numel;
    place.chunk_rows = chunk_rows_of(param, world_size_);
    place.chunk_numel = place.chunk_rows * param.row_numel;
    if (param.trainable) {
      trainable_count_ += 1;
      const std::int64_t padded =
          padded_to(padded_to(place.chunk_numel, param.chunk_multiple), grad_alignment);
      place.grad_offset = grad_numel_;
      place.flat_gradient_offset = gradient_bytes_;
      grad_numel_ += padded;
      gradient_bytes_ += static_cast<std::size_t>(padded) * itemsize(grad_dtype_of(param));
    }
    needs_cast_ = needs_cast_ || (param.gathered && param.shard_dtype != param.param_dtype);
    placements_.push_back(place);
    place_chunk(placements_.size() - 1);
    if (large_count_ + 1 == placements_.size() && is_large(param, world_size_, direct_bytes_)) {
      large_count_ += 1;
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
  return {std::move(params),   like->world_size_,   like->grad_dtype_,
          like->reduce_dtype_, like->direct_bytes_, like->is_offloaded_};
}

void UnitLayout::place_chunk(std::size_t param) {
  // On one rank all three are one buffer unless something is cast.
  const std::size_t alignment = world_size_ == 1 ? kRegionAlignment : kAlignment;
  ParamPlacement& place = placements_[param];
  const std::size_t chunk = padded_numel(param);
  place.shard_offset = shard_bytes_;
  shard_bytes_ = align_up(shard_bytes_ + chunk * itemsize(params_[param].shard_dtype), alignment);
  place.gather_offset = gather_bytes_;
  gather_bytes_ = align_up(gather_bytes_ + chunk * itemsize(params_[param].param_dtype), alignment);
  place.unsharded_offset = unsharded_bytes_;
  const std::size_t region = world_size_ == 1 ? chunk * itemsize(params_[param].param_dtype)
                                              : region_bytes_of(params_[param], world_size_);
  unsharded_bytes_ = align_up(unsharded_bytes_ + region, kRegionAlignment);
}

std::size_t UnitLayout::padded_numel(std::size_t param) const {
  return static_cast<std::size_t>(
      padded_to(static_cast<std::int64_t>(gathered_numel(param)), params_[param].chunk_multiple));
}

std::size_t UnitLayout::gathered_numel(std::size_t param) const {
  return params_[param].gathered ? static_cast<std::size_t>(placements_[param].chunk_numel) : 0;
}

std::vector<DType> UnitLayout::unsharded_grad_dtypes() const {
  std::vector<DType> dtypes;
  for (const ParamSpec& param : params_) {
    if (param.trainable) {
      dtypes.push_back(param.unsharded_grad_dtype.value_or(param.param_dtype));
    }
  }
  return dtypes;
}

RowRange UnitLayout::rows(std::size_t param, int rank) const {
  const std::int64_t all = params_.at(param).rows;
  const std::int64_t chunk = placements_[param].chunk_rows;
  const std::int64_t first = std::min(all, chunk * rank);
  return {first, std::min(chunk, all - first)};
}

// - Parts

std::size_t UnitLayout::row_bytes(std::size_t param) const {
  return std::max(row_bytes(Wire::Gather, param), row_bytes(Wire::Reduce, param));
}

std::size_t UnitLayout::row_bytes(Wire wire, std::size_t param) const {
  const auto numel =
      static_cast<std::size_t>(params_.at(param).row_numel) * static_cast<std::size_t>(world_size_);
  const ParamSpec& spec = params_[param];
  const bool travels = wire == Wire::Gather ? spec.gathered : spec.trainable;
  return travels ? numel * itemsize(wire == Wire::Gather ? spec.param_dtype : reduce_dtype_) : 0;
}

// On the wire, of all ranks together.
std::size_t UnitLayout::message_bytes(Wire wire, std::size_t param) const {
  return static_cast<std::size_t>(placements_[param].chunk_rows) * row_bytes(wire, param);
}

// Parts begin at aligned addresses if the size of a row allows it.
std::int64_t UnitLayout::rows_of_a_message(Wire wire, std::size_t param,
                                           std::size_t most_bytes) const {
  const std::size_t row = row_bytes(wire, param);
  if (row > most_bytes && wire == Wire::Reduce) {
    return 1;
  }
  FSDP_CHECK(row <= most_bytes || params_[param].runs == 1, "max_message_bytes is ", most_bytes,
             ". Parameter '", params_[param].name, "' has ", row,
             " bytes, and it is sharded in another dimension than 0, so messages cannot cut it. "
             "Increase max_message_bytes, or leave it out.");
  FSDP_CHECK(row <= most_bytes, "max_message_bytes is ", most_bytes,
             ". A message needs room for one row of parameter '", params_[param].name,
             "' from each of ", world_size_, " ranks: at least ", row,
             " bytes. Increase it, or leave it out.");
  const auto rows = most_bytes / row;
  const std::size_t aligned = kAlignment / std::gcd(kAlignment, row / world_size_);
  return static_cast<std::int64_t>(rows >= aligned ? rows / aligned * aligned : rows);
}

std::vector<LayoutPart> UnitLayout::parts(Wire wire, std::size_t most_bytes) const {
  if (most_bytes == 0) {
    return {whole(*this)};
  }
  std::vector<LayoutPart> parts;
  LayoutPart open;  // whole parameters of `bytes` bytes
  std::size_t bytes = 0;
  const auto close = [&](std::size_t end) {
    open.end = end;
    if (open.end > open.first) {
      parts.push_back(open);
    }
    bytes = 0;
  };
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const std::size_t more = message_bytes(wire, i);
    if (bytes + more > most_bytes) {
      close(i);
      open.first = i;
    }
    if (more <= most_bytes) {
      bytes += more;
      continue;
    }
    if (wire == Wire::Reduce && params_[i].runs > 1) {  // its rows are not contiguous
      close(i + 1);
      open.first = i + 1;
      continue;
    }
    const std::int64_t rows = rows_of_a_message(wire, i, most_bytes);
    for (std::int64_t row = 0; row < placements_[i].chunk_rows; row += rows) {
      parts.push_back({i, i + 1, row, std::min(rows, placements_[i].chunk_rows - row)});
    }
    open.first = i + 1;
  }
  close(params_.size());
  return parts.empty() ? std::vector<LayoutPart>{whole(*this)} : parts;
}

std::size_t UnitLayout::end_of_gather(std::size_t end) const {
  return end < placements_.size() ? placements_[end].gather_offset : gather_bytes_;
}

std::int64_t UnitLayout::end_of_gradients(std::size_t end) const {
  for (; end < placements_.size(); ++end) {
    if (placements_[end].grad_offset >= 0) {
      return placements_[end].grad_offset;
    }
  }
  return grad_numel_;
}

std::int64_t UnitLayout::first_gradient(const LayoutPart& part) const {
  const std::int64_t first = end_of_gradients(part.first);
  return part.is_of_rows() ? first + part.first_row * params_[part.first].row_numel : first;
}

// - Plans

// Entries of the finish plan include the padding behind each chunk. Copying it clears what users
// wrote into the gradient's padding, which norms count. The source's padding is zero unless a hook
// wrote there.
ReducePlan UnitLayout::reduce_plan(const LayoutPart& part) const {
  FSDP_CHECK(!part.is_of_rows() || params_[part.first].runs == 1, "Parameter '",
             params_[part.first].name,
             "' is sharded in another dimension than 0, so a message cannot have some of its rows. "
             "This is a bug in fsdp_ext.");
  const auto first = params_.begin() + static_cast<std::ptrdiff_t>(part.first);
  ReducePlan plan;
  plan.first_trainable = static_cast<std::size_t>(std::count_if(
      params_.begin(), first, [](const ParamSpec& param) { return param.trainable; }));
  plan.first_gradient = first_gradient(part);
  plan.pack.world_size = world_size_;
  plan.finish.crosses_pcie = is_offloaded_;
  for (std::size_t i = part.first; i < part.end; ++i) {
    const ParamPlacement& place = placements_[i];
    if (place.grad_offset < 0) {
      continue;
    }
    const std::int64_t begin = part.first_row * params_[i].row_numel;
    const std::int64_t numel =
        part.is_of_rows() ? part.rows * params_[i].row_numel : place.chunk_numel;
    const std::int64_t offset = place.grad_offset + begin - plan.first_gradient;
    plan.pack.entries.push_back({std::max<std::int64_t>(0, place.numel - begin), numel, offset,
                                 params_[i].runs, part.is_of_rows() ? place.chunk_numel : 0});
    const bool is_last = !part.is_of_rows() || part.first_row + part.rows == place.chunk_rows;
    const std::int64_t padded =
        is_last ? end_of_gradients(i + 1) - place.grad_offset - begin : numel;
    plan.pack.segment_numel += padded;
    const DType grad_dtype = grad_dtype_of(params_[i]);
    plan.finish.entries.push_back(
        {static_cast<std::size_t>(offset) * itemsize(reduce_dtype_),
         place.flat_gradient_offset + static_cast<std::size_t>(begin) * itemsize(grad_dtype),
         padded, reduce_dtype_, grad_dtype});
  }
  return plan;
}

std::size_t UnitLayout::first_of_several_runs(const LayoutPart& part) const {
  std::size_t param = part.first;
  while (param < part.end && params_[param].runs == 1) {
    param += 1;
  }
  return param;
}

// See Note [gather plans].
GatherPlan UnitLayout::gather_plan(GatherBy by, const LayoutPart& part) const {
  if (part.is_of_rows()) {
    return gather_plan_of_rows(part);
  }
  GatherPlan plan;
  const std::size_t direct_end = by == GatherBy::Parameter ? first_of_several_runs(part)
                                 : by == GatherBy::Size    ? large_count_
                                                           : 0;
  const std::size_t first_packed = std::clamp(direct_end, part.first, part.end);
  plan.packed_offset = end_of_gather(first_packed);
  plan.packed_bytes = end_of_gather(part.end) - plan.packed_offset;
  plan.unpack.segment_bytes = plan.packed_bytes;
  plan.unpack.world_size = world_size_;
  for (std::size_t i = part.first; i < part.end; ++i) {
    const ParamPlacement& place = placements_[i];
    const std::size_t chunk = gathered_numel(i) * itemsize(params_[i].param_dtype);
    if (chunk == 0) {
      continue;
    }
    if (i < first_packed) {
      plan.direct.push_back({place.gather_offset, place.unsharded_offset, chunk});
    } else {
      plan.unpack.entries.push_back({chunk, place.gather_offset - plan.packed_offset,
                                     place.unsharded_offset, params_[i].runs});
    }
  }
  // A single parameter would be copied from staging as it is.
  if (plan.unpack.entries.size() == 1 && plan.unpack.entries.front().runs == 1) {
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

// A collective cannot leave gaps between the ranks' rows, so rows are packed.
GatherPlan UnitLayout::gather_plan_of_rows(const LayoutPart& part) const {
  const ParamSpec& param = params_[part.first];
  const ParamPlacement& place = placements_[part.first];
  const std::size_t row = static_cast<std::size_t>(param.row_numel) * itemsize(param.param_dtype);
  const std::size_t begin = static_cast<std::size_t>(part.first_row) * row;
  GatherPlan plan;
  plan.packed_offset = place.gather_offset + begin;
  plan.packed_bytes = static_cast<std::size_t>(part.rows) * row;
  plan.unpack.segment_bytes = plan.packed_bytes;
  plan.unpack.world_size = world_size_;
  plan.unpack.entries.push_back({plan.packed_bytes, 0, place.unsharded_offset + begin, 1,
                                 static_cast<std::size_t>(place.chunk_rows) * row});
  return plan;
}

// A region holds the chunks of all ranks in order, so the chunks of world_size / ranks neighbours
// form one larger chunk. Regions are kept as they are, so runs do not matter.
UnitLayout UnitLayout::regrouped(int ranks) const {
  FSDP_CHECK(ranks >= 1 && world_size_ % ranks == 0, "Parameters of ", world_size_,
             " ranks cannot be shared by groups of ", ranks, ". Use a divisor.");
  std::vector<ParamSpec> params = params_;
  for (std::size_t i = 0; i < params.size(); ++i) {
    params[i].rows = placements_[i].chunk_rows * world_size_;
    params[i].runs = 1;
    params[i].shard_dtype = params[i].param_dtype;
    params[i].trainable = false;
    params[i].chunk_multiple = world_size_ == 1 ? params[i].chunk_multiple : 1;
  }
  return {std::move(params), ranks, grad_dtype_, reduce_dtype_, direct_bytes_};
}

UnpackPlan UnitLayout::keep_plan(int rank) const {
  UnpackPlan plan;
  plan.segment_bytes = unsharded_bytes_;  // what may be read
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const std::size_t chunk = gathered_numel(i) * itemsize(params_[i].param_dtype);
    if (chunk > 0) {
      plan.entries.push_back(
          {chunk, placements_[i].unsharded_offset + static_cast<std::size_t>(rank) * chunk,
           placements_[i].gather_offset, 1});
    }
  }
  return plan;
}

CastPlan UnitLayout::shard_to_gather_plan(const LayoutPart& part) const {
  CastPlan plan;
  plan.crosses_pcie = is_offloaded_;
  for (std::size_t i = part.first; i < part.end; ++i) {
    const ParamSpec& param = params_[i];
    const ParamPlacement& place = placements_[i];
    const auto begin = static_cast<std::size_t>(part.first_row * param.row_numel);
    const CastEntry entry{place.shard_offset + begin * itemsize(param.shard_dtype),
                          place.gather_offset + begin * itemsize(param.param_dtype),
                          part.is_of_rows() ? part.rows * param.row_numel : place.chunk_numel,
                          param.shard_dtype, param.param_dtype};
    if (entry.numel == 0 || !param.gathered) {
      continue;
    }
    // Entries without a gap between them are cast as one.
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
