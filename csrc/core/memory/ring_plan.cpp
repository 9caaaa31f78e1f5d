#include "core/memory/ring_plan.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "base/align.h"
#include "core/memory/layout.h"

namespace fsdp {
namespace {

// Places buckets one after the other in a ring of a given size. It keeps many ways to place the
// buckets so far, because a place that is free may leave no room for a later bucket.
class Placing {
 public:
  Placing(const std::vector<std::size_t>& bytes, const BucketSets& together)
      : bytes_(bytes), conflicts_(bytes.size()), last_conflict_(bytes.size(), 0) {
    std::vector<std::size_t> turn(bytes.size(), kNever);
    for (const std::vector<int>& set : together) {
      for (const int bucket : set) {
        if (bytes_of(bucket) > 0 && turn[index(bucket)] == kNever) {
          turn[index(bucket)] = order_.size();
          order_.push_back(bucket);
        }
      }
    }
    for (const std::vector<int>& set : together) {
      for (const int bucket : set) {
        for (const int other : set) {
          if (other != bucket && bytes_of(bucket) > 0 && bytes_of(other) > 0) {
            conflicts_[index(bucket)].insert(other);
            last_conflict_[index(bucket)] =
                std::max(last_conflict_[index(bucket)], turn[index(other)]);
          }
        }
      }
    }
  }

  // Returns the offset of each bucket in a ring of `size` bytes, or nothing if none is found.
  std::vector<std::size_t> in(std::size_t size) const {
    std::vector<std::vector<Way>> ways = {{Way{}}};  // after each turn
    for (std::size_t turn = 0; turn < order_.size(); ++turn) {
      ways.push_back(next_ways(ways.back(), turn, size));
      if (ways.back().empty()) {
        return {};
      }
    }
    std::vector<std::size_t> offsets(bytes_.size(), 0);
    std::size_t way = 0;
    for (std::size_t turn = order_.size(); turn > 0; --turn) {
      offsets[index(order_[turn - 1])] = ways[turn][way].offset;
      way = ways[turn][way].before;
    }
    return offsets;
  }

 private:
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);
  static constexpr std::size_t kMostWays = 64;

  using Placed = std::pair<int, std::size_t>;  // a bucket and its offset

  // One way to place the buckets up to one turn.
  struct Way {
    std::size_t offset = 0;      // of this turn's bucket
    std::size_t before = 0;      // the way that it continues, by its number in the turn before
    std::vector<Placed> placed;  // the buckets that still matter to later ones
  };

  static std::size_t index(int bucket) { return static_cast<std::size_t>(bucket); }
  std::size_t bytes_of(int bucket) const {
    return align_up(bytes_[index(bucket)], kRegionAlignment);
  }

  std::vector<Way> next_ways(const std::vector<Way>& ways, std::size_t turn,
                             std::size_t size) const {
    const int bucket = order_[turn];
    std::vector<Way> next;
    std::set<std::vector<Placed>> known;
    for (std::size_t number = 0; number < ways.size(); ++number) {
      for (const std::size_t offset : free_offsets(ways[number], bucket, size)) {
        Way way{offset, number, {}};
        for (const Placed& placed : ways[number].placed) {
          if (last_conflict_[index(placed.first)] > turn) {
            way.placed.push_back(placed);
          }
        }
        if (last_conflict_[index(bucket)] > turn) {
          way.placed.emplace_back(bucket, offset);
        }
        if (next.size() < kMostWays && known.insert(way.placed).second) {
          next.push_back(std::move(way));
        }
      }
    }
    return next;
  }

  // At an end of the ring, or beside a bucket that is unsharded at the same time.
  std::set<std::size_t> free_offsets(const Way& way, int bucket, std::size_t size) const {
    const std::size_t mine = bytes_of(bucket);
    std::set<std::size_t> candidates = {0, size - mine};
    std::vector<Placed> beside;
    for (const Placed& placed : way.placed) {
      if (conflicts_[index(bucket)].count(placed.first) > 0) {
        beside.push_back(placed);
        candidates.insert(placed.second + bytes_of(placed.first));
        if (placed.second >= mine) {
          candidates.insert(placed.second - mine);
        }
      }
    }
    for (auto offset = candidates.begin(); offset != candidates.end();) {
      const bool overlaps = std::any_of(beside.begin(), beside.end(), [&](const Placed& placed) {
        return *offset < placed.second + bytes_of(placed.first) && placed.second < *offset + mine;
      });
      offset = overlaps || *offset + mine > size ? candidates.erase(offset) : std::next(offset);
    }
    return candidates;
  }

  const std::vector<std::size_t>& bytes_;
  std::vector<int> order_;
  std::vector<std::set<int>> conflicts_;
  std::vector<std::size_t> last_conflict_;  // the last turn of a bucket in conflict with this one
};

// The buckets of each set have to fit.
std::size_t least_bytes(const std::vector<std::size_t>& bytes, const BucketSets& together) {
  std::size_t least = 0;
  for (const std::vector<int>& set : together) {
    least = std::max(
        least, std::accumulate(
                   set.begin(), set.end(), std::size_t{0}, [&bytes](std::size_t sum, int bucket) {
                     return sum +
                            align_up(bytes[static_cast<std::size_t>(bucket)], kRegionAlignment);
                   }));
  }
  return least;
}

}  // namespace

RingPlan equal_slots(int slots, std::size_t slot_bytes) {
  return {slots,
          slot_bytes,
          static_cast<std::size_t>(slots) * align_up(slot_bytes, kRegionAlignment),
          {}};
}

// If the buckets do not fit into the least size, larger ones are tried, up to that of equal slots.
RingPlan plan_ring(const std::vector<std::size_t>& bytes, int slots, const BucketSets& together) {
  constexpr std::size_t kSizes = 8;
  const auto buckets = static_cast<int>(
      std::count_if(bytes.begin(), bytes.end(), [](std::size_t size) { return size > 0; }));
  const std::size_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  RingPlan plan = equal_slots(std::min(slots, buckets), largest);
  if (together.empty()) {
    return plan;
  }
  const Placing placing(bytes, together);
  const std::size_t least = least_bytes(bytes, together);
  for (std::size_t i = 0; i < kSizes && least < plan.bytes; ++i) {
    const std::size_t size = align_up(least + (plan.bytes - least) * i / kSizes, kRegionAlignment);
    std::vector<std::size_t> offsets = placing.in(size);
    if (!offsets.empty()) {
      plan.bytes = size;
      plan.offsets = std::move(offsets);
      break;
    }
  }
  return plan;
}

}  // namespace fsdp
