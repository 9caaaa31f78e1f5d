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

OrderCheck::OrderCheck(Device& device, Lane& lane, Lane* replicas)
    : device_(device),
      compared_(device.new_event()),
      mine_(std::make_unique<Announcement>()),
      my_order_(std::make_unique<Order>()) {
  const auto add = [this](Lane& of_ranks, const char* noun) {
    const auto size = static_cast<std::size_t>(of_ranks.communicator().size());
    ranks_.push_back({&of_ranks, noun, std::vector<Announcement>(size), std::vector<Order>(size)});
  };
  add(lane, "rank ");
  if (replicas != nullptr) {
    add(*replicas, "shard group ");
  }
}

// After a timeout, a comparison may still write into its buffers.
OrderCheck::~OrderCheck() {
  for (Ranks& ranks : ranks_) {
    ranks.lane->drain();
  }
}

bool OrderCheck::has_other_ranks() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const Ranks& ranks) { return ranks.announcements.size() > 1; });
}

void OrderCheck::compare(const Bucket& bucket) {
  FSDP_CHECK(!device_.is_capturing(),
             "A CUDA graph cannot capture the first iteration, which compares the ranks. Run a few "
             "whole steps before capturing one.");
  Announcement& mine = *mine_;
  mine = {};
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
  for (Ranks& ranks : ranks_) {
    compare_announcements(ranks, bucket);
  }
}

std::string OrderCheck::Ranks::name(std::size_t rank) const { return detail::concat(noun, rank); }

std::string OrderCheck::Ranks::own_name() const {
  return name(static_cast<std::size_t>(lane->communicator().rank()));
}

void OrderCheck::compare_announcements(Ranks& ranks, const Bucket& bucket) {
  const Announcement& mine = *mine_;
  Lane& lane = *ranks.lane;
  static const std::string kLabel = "the comparison of the next all-gather";
  lane.host_all_gather(bucket.gather.all_ranks().label, kLabel, &mine, ranks.announcements.data(),
                       sizeof(mine));
  lane.stream().record(*compared_);
  compared_->synchronize(device_.timeout(),
                         "the comparison of " + mine.describe() + " on all ranks");
  lane.communicator().check();
  const auto own = static_cast<std::size_t>(lane.communicator().rank());
  for (std::size_t rank = 0; rank < ranks.announcements.size(); ++rank) {
    const Announcement& theirs = ranks.announcements[rank];
    // Ranks of another mesh may gather another unit than this one, but all of them the same.
    const bool is_elsewhere = theirs.mesh != mine.mesh && theirs.is_in_step_with(mine);
    const std::size_t like = is_elsewhere ? static_cast<std::size_t>(theirs.mesh) : own;
    const Announcement& expected = ranks.announcements[like];
    if (!theirs.is_in_step_with(expected) || !theirs.has_unit_of(expected)) {
      throw RanksDiffer(detail::concat(
          "As all-gather ", mine.sequence, " of the first iteration, ", ranks.name(like),
          " issues ", expected.describe(), " but ", ranks.name(rank), " issues ", theirs.describe(),
          ". All ranks must run the same units, in the same order and of the same sizes. Make "
          "the model and its control flow the same on every rank."));
    }
  }
}

void OrderCheck::compare(const Partition& partition,
                         const std::vector<std::unique_ptr<Unit>>& units) {
  *my_order_ = Order(partition, units);
  for (Ranks& ranks : ranks_) {
    compare_orders(ranks, units);
  }
}

void OrderCheck::compare_orders(Ranks& ranks, const std::vector<std::unique_ptr<Unit>>& units) {
  static const std::string kWhat = "the comparison of the buckets";
  Lane& lane = *ranks.lane;
  lane.host_all_gather(kWhat, kWhat, my_order_.get(), ranks.orders.data(), sizeof(Order));
  lane.stream().record(*compared_);
  compared_->synchronize(device_.timeout(), kWhat);
  lane.communicator().check();
  for (std::size_t rank = 0; rank < ranks.orders.size(); ++rank) {
    if (ranks.orders[rank].hash != my_order_->hash) {
      throw RanksDiffer(describe_difference(ranks, rank, units));
    }
  }
}

std::string OrderCheck::describe_difference(const Ranks& ranks, std::size_t rank,
                                            const std::vector<std::unique_ptr<Unit>>& units) const {
  const Order& theirs = ranks.orders[rank];
  const auto name = [&units](const Order::Entry& entry) -> std::string {
    if (entry.unit == Order::kNextBucket || entry.unit == Order::kNone) {
      return entry.unit == Order::kNone ? "no more" : "another bucket";
    }
    const auto number = static_cast<std::size_t>(entry.unit);
    return number < units.size() ? "'" + units[number]->name + "'" : "a unit more";
  };
  const auto* const end = my_order_->entries + Order::kMost;
  const auto [mine, other] =
      std::mismatch(static_cast<const Order::Entry*>(my_order_->entries), end, theirs.entries);
  if (mine != end && mine->unit == other->unit) {
    return detail::concat("All ranks must train as many parameters, but ", ranks.own_name(),
                          " trains ", mine->trained, " of unit ", name(*mine), " and ",
                          ranks.name(rank), " trains ", other->trained,
                          ". Make its modules and its frozen parameters the same on every rank, "
                          "also where experts differ.");
  }
  return detail::concat(
      "All ranks must run the same units in the same order and put them into the same buckets, "
      "but ",
      ranks.own_name(), " has ", mine != end ? name(*mine) : "other units", " where ",
      ranks.name(rank), " has ", mine != end ? name(*other) : "others",
      ". Make the model, its control flow and its settings the same on every rank. A rank that "
      "leaves a unit out on purpose calls its join_empty().");
}

}  // namespace fsdp
