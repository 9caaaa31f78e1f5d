#include "core/gather/bucket_gather.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/check.h"
#include "core/units/bucket_names.h"

namespace fsdp {
namespace {

// The part of `whole`, a cast into the gather input, that fills the message. `destination` is where
// this rank's part of the message's output begins.
void add_casts(CastPlan& plan, const CastPlan& whole, const GatherMessage& message,
               std::size_t destination) {
  plan.crosses_pcie = whole.crosses_pcie;
  for (const CastEntry& entry : whole.entries) {
    const std::size_t size = itemsize(entry.destination_dtype);
    const std::size_t end = entry.destination_offset + static_cast<std::size_t>(entry.numel) * size;
    const std::size_t from = std::max(entry.destination_offset, message.source_offset);
    const std::size_t to = std::min(end, message.source_offset + message.bytes);
    if (from < to) {
      const std::size_t skipped = (from - entry.destination_offset) / size;
      CastEntry part = entry;
      part.source_offset += skipped * itemsize(entry.source_dtype);
      part.destination_offset = destination + (from - message.source_offset);
      part.numel = static_cast<std::int64_t>((to - from) / size);
      plan.entries.push_back(part);
    }
  }
}

void plan_casts_in_place(GatherPiece& piece, int rank, Packer& packer) {
  const auto before = static_cast<std::size_t>(rank);
  for (const GatherMessage& message : piece.plan.direct) {
    add_casts(piece.cast_into_slot, piece.cast_plan, message,
              message.destination_offset + before * message.bytes);
  }
  if (piece.plan.packed_bytes > 0) {
    add_casts(piece.cast_into_staging, piece.cast_plan,
              {piece.plan.packed_offset, 0, piece.plan.packed_bytes},
              before * piece.plan.packed_bytes);
  }
  packer.prepare(piece.cast_into_slot);
  packer.prepare(piece.cast_into_staging);
}

std::vector<GatherPiece> pieces_of(const UnitLayout& layout, MessageLimits limits,
                                   Communicator& communicator, Lanes& lanes) {
  std::vector<GatherPiece> pieces;
  for (const LayoutPart& part : gather_parts(layout, limits)) {
    GatherPiece piece;
    piece.part = part;
    piece.cast_plan = layout.shard_to_gather_plan(part);
    piece.plan = layout.gather_plan(communicator.traits().gather_by, part);
    piece.bytes = piece.plan.packed_bytes;
    for (const GatherMessage& message : piece.plan.direct) {
      piece.bytes += message.bytes;
    }
    piece.bytes *= static_cast<std::size_t>(layout.world_size());
    piece.gathered = lanes.device->new_event();
    lanes.packer->prepare(piece.cast_plan);
    if (layout.needs_cast() && layout.world_size() > 1) {
      plan_casts_in_place(piece, communicator.rank(), *lanes.packer);
    }
    lanes.packer->prepare(piece.plan.unpack);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// For each unit, the last piece of the gather that has a parameter of it.
std::vector<std::size_t> last_pieces_of(const std::vector<Unit*>& units,
                                        const std::vector<GatherPiece>& pieces) {
  std::vector<std::size_t> last_pieces;
  std::size_t first_param = 0;
  for (const Unit* unit : units) {
    const std::size_t end_param = first_param + unit->layout.params().size();
    last_pieces.push_back(0);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].part.first < end_param && pieces[i].part.end > first_param) {
        last_pieces.back() = i;
      }
    }
    first_param = end_param;
  }
  return last_pieces;
}

std::size_t bytes_of(const std::vector<GatherPiece>& pieces) {
  std::size_t bytes = 0;
  for (const GatherPiece& piece : pieces) {
    bytes += piece.bytes;
  }
  return bytes;
}

Communicator& communicator_of(const std::vector<Unit*>& units, Lanes& lanes) {
  return lanes.of_mesh(units.front()->mesh).gather.communicator();
}

// All units of a bucket have the same group.
std::unique_ptr<GroupShard> group_shard_of(const UnitLayout& layout,
                                           const std::vector<Unit*>& units, Lanes& lanes) {
  const int ranks = units.front()->reshard_group;
  if (ranks == 0) {
    return nullptr;
  }
  Communicator& group = lanes.of_mesh(units.front()->mesh).group_of(ranks).gather.communicator();
  const std::string what = detail::concat("the all-gather over ", ranks, " ranks");
  return std::make_unique<GroupShard>(group, layout, units, label_of(what, units), lanes);
}

}  // namespace

// All units of a bucket have the same message_limits.
GatherSource::GatherSource(Collective collective, Communicator& over, const UnitLayout& layout,
                           const std::vector<Unit*>& units, std::string a_label, Lanes& lanes)
    : op(collective),
      communicator(over),
      label(std::move(a_label)),
      pieces(pieces_of(layout, units.front()->message_limits, over, lanes)),
      last_pieces(last_pieces_of(units, pieces)),
      bytes(bytes_of(pieces)) {}

BucketGather::BucketGather(const UnitLayout& layout, const std::vector<Unit*>& units, Lanes& lanes)
    : all_ranks_(Collective::AllGather, communicator_of(units, lanes), layout, units,
                 label_of("the all-gather", units), lanes),
      group_(group_shard_of(layout, units, lanes)) {}

std::size_t BucketGather::buffer_bytes(const BucketBuffers& planned) const {
  return (persistent_slot_ != nullptr ? persistent_slot_->bytes : 0) +
         (input_ != nullptr ? align_up(planned.gather_input, kRegionAlignment) : 0) +
         (group_ != nullptr && group_->memory != nullptr ? planned.group_shard : 0);
}

}  // namespace fsdp
