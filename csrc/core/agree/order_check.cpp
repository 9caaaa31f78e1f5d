#include "core/agree/order_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/check.h"
#include "core/record/flight_recorder.h"

namespace fsdp {

struct OrderCheck::Announcement {
  bool is_in_step_with(const Announcement& other) const {
    return sequence == other.sequence && ranks == other.ranks;
  }
  bool has_unit_of(const Announcement& other) const {
    return std::strcmp(unit, other.unit) == 0 && bytes == other.bytes && pieces == other.pieces &&
           sizes == other.sizes;
  }

  std::string describe() const {
    const std::string over = ranks > 0 ? detail::concat(" over ", ranks, " ranks") : "";
    const std::string in =
        pieces > 1 ? detail::concat(" in ", pieces, " messages, the first of ", first_bytes) : "";
    return detail::concat("the all-gather", over, " of unit '", unit, "' (", bytes, " bytes", in,
                          ")");
  }

  std::uint64_t sequence;
  std::uint64_t bytes;  // of all pieces
  std::uint64_t pieces;
  std::uint64_t first_bytes;
  std::uint64_t sizes;  // a hash of the sizes of all pieces
  std::uint64_t ranks;  // of a smaller group or another mesh; 0: all
  std::uint64_t mesh;   // the first rank of another mesh; 0 for the root's
  char unit[96];
};

// A partition as ranks compare it: its first units, bucket by bucket, and a hash of all.
struct OrderCheck::Order {
  static constexpr std::size_t kMost = 120;
  static constexpr std::int64_t kNextBucket = -1;
  static constexpr std::int64_t kNone = -2;

  struct Entry {
    std::int64_t unit = kNone;
    std::uint64_t trained = 0;  // parameters

    bool operator==(const Entry& other) const {
      return unit == other.unit && trained == other.trained;
    }
  };

  Order() = default;
  Order(const Partition& partition, const std::vector<std::unique_ptr<Unit>>& units) {
    std::size_t count = 0;
    const auto add = [&](const Entry& entry) {
      hash = mix(hash, static_cast<std::uint64_t>(entry.unit));
      hash = mix(hash, entry.trained);
      if (count < kMost) {
        entries[count++] = entry;
      }
    };
    for (const std::vector<int>& bucket : partition) {
      for (const int number : bucket) {
        add({number, units.at(static_cast<std::size_t>(number))->layout.trainable_count()});
      }
      add({kNextBucket});
    }
  }

  std::uint64_t hash = 0;
  Entry entries[kMost];
};

OrderCheck::OrderCheck(Lanes& lanes, RankExchange& exchange) : lanes_(lanes), exchange_(exchange) {}

void OrderCheck::compare(const Bucket& bucket) {
  FSDP_CHECK(!lanes_.device->is_capturing(),
             "A CUDA graph cannot capture the first iteration, which compares the ranks. Run a few "
             "whole steps before capturing one.");
  Announcement mine{};
  mine.sequence = ++sequence_;
  const GatherSource& source = bucket.gather.source();
  mine.pieces = source.pieces.size();
  mine.first_bytes = source.pieces.front().bytes;
  for (const GatherPiece& piece : source.pieces) {
    mine.bytes += piece.bytes;
    mine.sizes = mix(mine.sizes, piece.bytes);
  }
  const bool of_all = !source.is_of_group() && bucket.mesh == nullptr;
  mine.ranks = of_all ? 0 : static_cast<std::uint64_t>(source.communicator.size());
  mine.mesh = bucket.mesh == nullptr ? 0 : static_cast<std::uint64_t>(bucket.mesh->ranks.front());
  std::snprintf(mine.unit, sizeof(mine.unit), "%s", bucket.name.c_str());
  const std::vector<Announcement> all =
      exchange_.of_all("the comparison of " + mine.describe() + " on all ranks", mine);
  const std::size_t own = exchange_.rank();
  const std::size_t first_of_group =
      own - own % static_cast<std::size_t>(lanes_.gather.communicator().size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Announcement& theirs = all[rank];
    // Ranks of another mesh may gather another unit than this one, but all of them the same.
    const bool is_elsewhere = theirs.mesh != mine.mesh && theirs.is_in_step_with(mine);
    const std::size_t like =
        is_elsewhere ? first_of_group + static_cast<std::size_t>(theirs.mesh) : own;
    const Announcement& expected = is_elsewhere ? all[like] : mine;
    if (!theirs.is_in_step_with(expected) || !theirs.has_unit_of(expected)) {
      throw RanksDiffer(detail::concat(
          "As all-gather ", mine.sequence, " of the first iteration, rank ",
          exchange_.global_rank(like), " issues ", expected.describe(), " but rank ",
          exchange_.global_rank(rank), " issues ", theirs.describe(),
          ". All ranks must run the same units, in the same order and of the same sizes. Make "
          "the model and its control flow the same on every rank."));
    }
  }
}

void OrderCheck::compare(const Partition& partition,
                         const std::vector<std::unique_ptr<Unit>>& units) {
  const Order mine(partition, units);
  const std::vector<Order> all = exchange_.of_all("the comparison of the buckets", mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].hash != mine.hash) {
      throw RanksDiffer(describe_difference(mine, all[rank], rank, units));
    }
  }
}

std::string OrderCheck::describe_difference(const Order& my_order, const Order& theirs,
                                            std::size_t rank,
                                            const std::vector<std::unique_ptr<Unit>>& units) const {
  const int my_rank = exchange_.global_rank(exchange_.rank());
  const int their_rank = exchange_.global_rank(rank);
  const auto name = [&units](const Order::Entry& entry) -> std::string {
    if (entry.unit == Order::kNextBucket || entry.unit == Order::kNone) {
      return entry.unit == Order::kNone ? "no more" : "another bucket";
    }
    const auto number = static_cast<std::size_t>(entry.unit);
    return number < units.size() ? "'" + units[number]->name + "'" : "a unit more";
  };
  const auto* const end = my_order.entries + Order::kMost;
  const auto [mine, other] =
      std::mismatch(static_cast<const Order::Entry*>(my_order.entries), end, theirs.entries);
  if (mine != end && mine->unit == other->unit) {
    return detail::concat("All ranks must train as many parameters, but rank ", my_rank, " trains ",
                          mine->trained, " of unit ", name(*mine), " and rank ", their_rank,
                          " trains ", other->trained,
                          ". Make its modules and its frozen parameters the same on every rank, "
                          "also where experts differ.");
  }
  return detail::concat(
      "All ranks must run the same units in the same order and put them into the same buckets, "
      "but rank ",
      my_rank, " has ", mine != end ? name(*mine) : "other units", " where rank ", their_rank,
      " has ", mine != end ? name(*other) : "others",
      ". Make the model, its control flow and its settings the same on every rank. A rank that "
      "leaves a unit out on purpose calls its join_empty().");
}

}  // namespace fsdp
