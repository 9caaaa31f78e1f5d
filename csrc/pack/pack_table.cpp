#include "pack/pack_table.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace fsdp {
namespace {

void add_span(TileTable& table, Span span, std::int64_t tile_elements) {
  if (span.extent == 0) {
    return;
  }
  constexpr auto kMost = static_cast<std::int64_t>(std::numeric_limits<std::uint32_t>::max());
  const std::int64_t tiles = (span.extent + kTileSlack + tile_elements - 1) / tile_elements;
  const auto before = static_cast<std::int64_t>(table.span_of_tile.size());
  FSDP_CHECK(before + tiles <= kMost, "a table expects at most ", kMost, " tiles but has ",
             before + tiles, "; make smaller units");
  span.first_tile = static_cast<std::uint32_t>(before);
  table.span_of_tile.insert(table.span_of_tile.end(), static_cast<std::size_t>(tiles),
                            static_cast<std::uint32_t>(table.spans.size()));
  table.spans.push_back(span);
}

void check_runs(std::int64_t chunk, std::int64_t runs, std::int64_t stride) {
  FSDP_CHECK(runs >= 1 && chunk % runs == 0, "a chunk of ", chunk,
             " expects a number of runs that divides it but got ", runs);
  FSDP_CHECK(stride == 0 || (runs == 1 && stride >= chunk), "a part of ", chunk,
             " of a chunk of one run expects a chunk that is larger but got one of ", stride,
             " and ", runs, " runs");
}

}  // namespace

std::uint32_t TileTable::first_tile_of_entry(std::int32_t entry) const {
  const auto span = std::find_if(spans.begin(), spans.end(), [entry](const Span& candidate) {
    return candidate.entry >= entry && candidate.entry != kNoEntry;
  });
  return span == spans.end() ? static_cast<std::uint32_t>(span_of_tile.size()) : span->first_tile;
}

// Spans cover the whole segment: an entry's span reaches to where the next entry begins.
TileTable make_table(const PackPlan& plan) {
  TileTable table;
  Span head;
  head.entry = kNoEntry;
  head.extent = plan.entries.empty() ? plan.segment_numel : plan.entries.front().offset;
  head.run = 1;
  add_span(table, head, kTileElements);
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const PackEntry& entry = plan.entries[i];
    const std::int64_t end =
        i + 1 < plan.entries.size() ? plan.entries[i + 1].offset : plan.segment_numel;
    check_runs(entry.chunk_numel, entry.runs, entry.stride);
    Span span;
    span.destination = entry.offset;
    span.extent = end - entry.offset;
    span.numel = entry.numel;
    span.chunk = entry.chunk_numel;
    span.run = std::max<std::int64_t>(entry.chunk_numel / entry.runs, 1);
    span.stride = entry.stride != 0 ? entry.stride : span.run;
    span.entry = static_cast<std::int32_t>(i);
    add_span(table, span, kTileElements);
  }
  return table;
}

TileTable make_table(const UnpackPlan& plan) {
  TileTable table;
  for (std::size_t i = 0; i < plan.entries.size(); ++i) {
    const UnpackEntry& entry = plan.entries[i];
    const auto chunk = static_cast<std::int64_t>(entry.chunk_bytes);
    const auto stride = static_cast<std::int64_t>(entry.stride);
    check_runs(chunk, entry.runs, stride);
    Span span;
    span.source = static_cast<std::int64_t>(entry.source_offset);
    span.destination = static_cast<std::int64_t>(entry.destination_offset);
    span.chunk = chunk;
    span.run = std::max<std::int64_t>(chunk / entry.runs, 1);
    span.entry = static_cast<std::int32_t>(i);
    // Parts of chunks are no neighbours in the destination: a span for each rank's.
    const int spans = stride != 0 ? plan.world_size : 1;
    span.extent = span.numel = stride != 0 ? chunk : chunk * plan.world_size;
    for (int rank = 0; rank < spans; ++rank) {
      add_span(table, span, kUnpackTileBytes);
      span.source += static_cast<std::int64_t>(plan.segment_bytes);
      span.destination += stride;
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
    Span span;
    span.source = static_cast<std::int64_t>(entry.source_offset);
    span.destination = static_cast<std::int64_t>(entry.destination_offset);
    span.extent = span.numel = span.chunk = entry.numel;
    span.run = std::numeric_limits<std::int64_t>::max();
    span.entry = static_cast<std::int32_t>(i);
    add_span(table->tiles, span, kTileElements);
  }
  return tables;
}

}  // namespace fsdp
