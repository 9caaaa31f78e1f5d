#include "pack/pack_table.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace fsdp {
namespace {

void add_range(TileTable& table, CopyRange range, std::int64_t tile_elements) {
  if (range.extent == 0) {
    return;
  }
  constexpr auto kMost = static_cast<std::int64_t>(std::numeric_limits<std::uint32_t>::max());
  const std::int64_t tiles = (range.extent + kTileSlack + tile_elements - 1) / tile_elements;
  const auto before = static_cast<std::int64_t>(table.range_of_tile.size());
  FSDP_CHECK(before + tiles <= kMost, "a plan has ", before + tiles, " tiles, but at most ", kMost,
             " can be numbered. Shard the model in smaller units.");
  range.first_tile = static_cast<std::uint32_t>(before);
  table.range_of_tile.insert(table.range_of_tile.end(), static_cast<std::size_t>(tiles),
                             static_cast<std::uint32_t>(table.ranges.size()));
  table.ranges.push_back(range);
}

}  // namespace

std::uint32_t TileTable::first_tile_of_entry(std::int32_t entry) const {
  const auto range =
      std::find_if(ranges.begin(), ranges.end(), [entry](const CopyRange& candidate) {
        return candidate.entry >= entry && candidate.entry != kNoEntry;
      });
  return range == ranges.end() ? static_cast<std::uint32_t>(range_of_tile.size())
                               : range->first_tile;
}

// Ranges cover the whole segment: an entry's range ends where the next entry begins.
TileTable make_table(const PackPlan& plan) {
  TileTable table;
  CopyRange head;
  head.entry = kNoEntry;
  head.extent = plan.entries.empty() ? plan.segment_numel : plan.entries.front().offset;
  head.run = 1;
  add_range(table, head, kTileElements);
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const PackEntry& entry = plan.entries[i];
    const std::int64_t end =
        i + 1 < plan.entries.size() ? plan.entries[i + 1].offset : plan.segment_numel;
    CopyRange range;
    range.destination = entry.offset;
    range.extent = end - entry.offset;
    range.numel = entry.numel;
    range.chunk = entry.chunk_numel;
    range.run = std::max<std::int64_t>(entry.chunk_numel / entry.runs, 1);
    range.stride = entry.stride != 0 ? entry.stride : range.run;
    range.entry = static_cast<std::int32_t>(i);
    add_range(table, range, kTileElements);
  }
  return table;
}

TileTable make_table(const UnpackPlan& plan) {
  TileTable table;
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const UnpackEntry& entry = plan.entries[i];
    const auto chunk = static_cast<std::int64_t>(entry.chunk_bytes);
    const auto stride = static_cast<std::int64_t>(entry.stride);
    CopyRange range;
    range.source = static_cast<std::int64_t>(entry.source_offset);
    range.destination = static_cast<std::int64_t>(entry.destination_offset);
    range.chunk = chunk;
    range.run = std::max<std::int64_t>(chunk / entry.runs, 1);
    range.entry = static_cast<std::int32_t>(i);
    // Parts of chunks are not contiguous in the destination, so each rank has a range of its own.
    const int ranges = stride != 0 ? plan.world_size : 1;
    range.extent = range.numel = stride != 0 ? chunk : chunk * plan.world_size;
    for (int rank = 0; rank < ranges; ++rank) {
      add_range(table, range, kUnpackTileBytes);
      range.source += static_cast<std::int64_t>(plan.segment_bytes);
      range.destination += stride;
    }
  }
  return table;
}

std::vector<CastTable> make_tables(const CastPlan& plan) {
  std::vector<CastTable> tables;
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const CastEntry& entry = plan.entries[i];
    auto table = std::find_if(tables.begin(), tables.end(), [&entry](const CastTable& candidate) {
      return candidate.source_dtype == entry.source_dtype &&
             candidate.destination_dtype == entry.destination_dtype;
    });
    if (table == tables.end()) {
      table = tables.insert(table, {entry.source_dtype, entry.destination_dtype, {}});
    }
    CopyRange range;
    range.source = static_cast<std::int64_t>(entry.source_offset);
    range.destination = static_cast<std::int64_t>(entry.destination_offset);
    range.extent = range.numel = range.chunk = entry.numel;
    range.run = std::numeric_limits<std::int64_t>::max();
    range.entry = static_cast<std::int32_t>(i);
    add_range(table->tiles, range, kTileElements);
  }
  return tables;
}

}  // namespace fsdp
