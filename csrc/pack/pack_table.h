// What the kernels read: a plan as ranges of the destination, and the ranges cut into tiles of
// equal work. Made once from a plan, the same for every device; no CUDA here.
//
// Note [tiles]
// A warp takes one tile at a time, whatever entry it belongs to, so that a unit of many small
// parameters and one of a single huge one keep the processors equally busy. A tile finds its range
// by one look-up and everything else by arithmetic. pack's table covers one rank's segment, of
// which there are world_size alike, so that it does not grow with the number of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "pack/pack.h"

namespace fsdp {

// Of either the source or the destination, elements; for unpack, which moves bytes, bytes.
constexpr std::int64_t kTileElements = 4096;
constexpr std::int64_t kUnpackTileBytes = 16384;

// Groups start at a multiple of 16 bytes of the destination, so up to so many elements before a
// range does. A range has room for them in its tiles.
constexpr std::int64_t kTileSlack = 15;

// A range of the destination that one entry writes.
struct CopyRange {
  std::int64_t source = 0;       // bytes; of pack nothing, its addresses come with each launch
  std::int64_t destination = 0;  // bytes; of pack elements, within a segment
  std::int64_t extent = 0;       // elements to write, padding included
  std::int64_t numel = 0;        // elements of the source (of pack: of all ranks)
  std::int64_t chunk = 0;        // elements of one rank's chunk
  std::int64_t run = 0;          // elements of one piece, see Note [runs]
  std::int64_t stride = 0;       // of pack: elements between two ranks' first pieces in the source
  std::uint32_t first_tile = 0;
  std::int32_t entry = 0;  // of the plan; kNoEntry for padding that belongs to none
};

constexpr std::int32_t kNoEntry = -1;

struct TileTable {
  std::vector<CopyRange> ranges;
  std::vector<std::uint32_t> range_of_tile;

  // The tiles of entries [first, last) are those of ranges in between, which are neighbours.
  std::uint32_t first_tile_of_entry(std::int32_t entry) const;
};

TileTable make_table(const PackPlan& plan);
TileTable make_table(const UnpackPlan& plan);

// One table for each pair of dtypes that `plan` has: a kernel knows one pair.
struct CastTable {
  DType source_dtype;
  DType destination_dtype;
  TileTable tiles;
};
std::vector<CastTable> make_tables(const CastPlan& plan);

}  // namespace fsdp
