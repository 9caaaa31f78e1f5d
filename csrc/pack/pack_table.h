// A plan as the kernels read it: ranges of the destination, cut into tiles of equal work. A table
// is made once from a plan and is the same for every device. Nothing here needs CUDA.
//
// Note [tiles]
// A warp processes one tile at a time. Tiles are equally large, so a unit of many small parameters
// keeps the processors as busy as a unit of one large parameter. One look-up finds the range of a
// tile, and arithmetic finds everything else. The table of pack covers one rank's segment, since
// all segments are alike, so it does not grow with the number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "pack/pack.h"

namespace fsdp {

// The size of a tile: in elements for pack and cast, in bytes for unpack.
constexpr std::int64_t kTileElements = 4096;
constexpr std::int64_t kUnpackTileBytes = 16384;

// Groups start at a multiple of 16 bytes of the destination (Note [groups]), so the first group may
// start this many elements before its range. The tiles of a range have room for them.
constexpr std::int64_t kTileSlack = 15;

// A range of the destination that one entry writes.
struct CopyRange {
  std::int64_t source = 0;       // bytes; unused in pack, whose addresses come with each launch
  std::int64_t destination = 0;  // bytes; in pack, elements within a segment
  std::int64_t extent = 0;       // elements to write, including padding
  std::int64_t numel = 0;        // elements of the source; in pack, those of all ranks
  std::int64_t chunk = 0;        // elements of one rank's chunk
  std::int64_t run = 0;          // elements of one run, see Note [runs]
  std::int64_t stride = 0;       // in pack, elements between two ranks' first runs in the source
  std::uint32_t first_tile = 0;
  std::int32_t entry = 0;  // index in the plan; kNoEntry for padding before the first entry
};

constexpr std::int32_t kNoEntry = -1;

struct TileTable {
  std::vector<CopyRange> ranges;
  std::vector<std::uint32_t> range_of_tile;

  // Ranges are in the order of entries, so the tiles of entries [first, last) are contiguous.
  std::uint32_t first_tile_of_entry(std::int32_t entry) const;
};

TileTable make_table(const PackPlan& plan);
TileTable make_table(const UnpackPlan& plan);

// Returns one table for each pair of dtypes in `plan`, since a kernel converts one pair.
struct CastTable {
  DType source_dtype;
  DType destination_dtype;
  TileTable tiles;
};
std::vector<CastTable> make_tables(const CastPlan& plan);

}  // namespace fsdp
