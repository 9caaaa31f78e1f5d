// The pieces of a gather, over all ranks of a unit or over a smaller group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/lanes.h"
#include "core/layout.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

// The state of the shards that a gather or a copy was made from.
struct ShardStamp {
  std::uint64_t iteration = 0;
  std::uint64_t version = 0;  // the sum over the units' shards
  bool valid = false;

  bool matches(const ShardStamp& other) const {
    return valid && other.valid && iteration == other.iteration && version == other.version;
  }
};

// One message of a gather and the copies around it: Note [pieces].
struct GatherPiece {
  LayoutPart part;
  CastPlan cast_plan;
  GatherPlan plan;
  std::size_t bytes = 0;            // on the wire, of all ranks together
  std::unique_ptr<Event> gathered;  // and unpacked
};

// The pieces of a gather over `communicator`, whose ranks have `layout`.
std::vector<GatherPiece> gathers_of(const UnitLayout& layout, std::size_t max_message_bytes,
                                    Communicator& communicator, Lanes& lanes);

}  // namespace fsdp
