// The source of a bucket's parameters: all ranks of its mesh, or a smaller group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/lanes.h"
#include "core/memory/layout.h"
#include "core/record/ledger.h"
#include "core/units/unit.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// Identifies the shard values in a gather or a copy, by iteration and version.
struct ShardStamp {
  std::uint64_t iteration = 0;
  std::uint64_t version = 0;  // the sum over the units' shards
  bool valid = false;

  bool matches(const ShardStamp& other) const {
    return valid && other.valid && iteration == other.iteration && version == other.version;
  }
};

// One message of a gather, with its cast before and its unpacking after: Note [pieces].
struct GatherPiece {
  LayoutPart part;
  CastPlan cast_plan;  // into the gather input
  // The same to this rank's part of the output: Note [gather inputs] in core/gather/gatherer.h.
  CastPlan cast_into_slot;
  CastPlan cast_into_staging;
  GatherPlan plan;
  std::size_t bytes = 0;            // on the wire, of all ranks together
  std::unique_ptr<Event> gathered;  // and unpacked
};

struct GatherSource {
  // `op` is AllGather, or GroupAllGather for a smaller group. `layout` is that of the bucket of
  // `units` over the ranks of the communicator.
  GatherSource(Collective op, Communicator& communicator, const UnitLayout& layout,
               const std::vector<Unit*>& units, std::string label, Lanes& lanes);

  bool is_of_group() const { return op == Collective::GroupAllGather; }
  const GatherPiece& last_piece() const { return pieces.back(); }
  // The last piece that has parameters of the unit.
  const GatherPiece& last_piece(const Unit& unit) const {
    return pieces[last_pieces[unit.position]];
  }

  const Collective op;
  Communicator& communicator;
  const std::string label;                     // in error messages
  const std::vector<GatherPiece> pieces;       // at least one
  const std::vector<std::size_t> last_pieces;  // for each unit
  const std::size_t bytes;                     // of all pieces
};

}  // namespace fsdp
