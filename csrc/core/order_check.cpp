#include "core/order_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fsdp {

struct OrderCheck::Announcement {
  std::string describe() const {
    return detail::concat("the all-gather of unit '", unit, "' (", bytes, " bytes)");
  }

  std::uint64_t sequence;
  std::uint64_t bytes;
  char unit[96];
};

// A partition as ranks compare it: its first units, bucket by bucket, and a hash of all.
struct OrderCheck::Order {
  static constexpr std::size_t kMost = 120;
  static constexpr std::int64_t kNextBucket = -1;
  static constexpr std::int64_t kNone = -2;

  struct Entry {
    std::int64_t unit = kNone;
    std::uint64_t gradient_bytes = 0;  // of all ranks, in the reduction

    bool operator==(const Entry& other) const {
      return unit == other.unit && gradient_bytes == other.gradient_bytes;
    }
  };

  Order() = default;
  Order(const Partition& partition, const std::vector<std::unique_ptr<Unit>>& units) {
    std::size_t count = 0;
    const auto add = [&](const Entry& entry) {
      hash = mix(mix(hash, static_cast<std::uint64_t>(entry.unit)), entry.gradient_bytes);
      if (count < kMost) {
        entries[count++] = entry;
      }
    };
    for (const std::vector<int>& bucket : partition) {
      for (const int number : bucket) {
        const UnitLayout& layout = units.at(static_cast<std::size_t>(number))->layout;
        const auto elements = static_cast<std::uint64_t>(layout.grad_numel());
        const auto ranks = static_cast<std::uint64_t>(layout.world_size());
        add({number, elements * ranks * itemsize(layout.reduce_dtype())});
      }
      add({kNextBucket});
    }
  }

  std::uint64_t hash = 0;
  Entry entries[kMost];
};

OrderCheck::OrderCheck(Device& device, Lane& lane)
    : device_(device),
      lane_(lane),
      compared_(device.new_event()),
      mine_(std::make_unique<Announcement>()),
      all_(static_cast<std::size_t>(lane.communicator().size())),
      my_order_(std::make_unique<Order>()),
      all_orders_(static_cast<std::size_t>(lane.communicator().size())) {}

OrderCheck::~OrderCheck() = default;

void OrderCheck::compare(const Bucket& bucket, std::size_t bytes) {
  FSDP_CHECK(!device_.is_capturing(),
             "A CUDA graph cannot capture the first iteration, which compares the ranks. Run a few "
             "whole steps before capturing one.");
  Announcement& mine = *mine_;
  mine = {};
  mine.sequence = ++sequence_;
  mine.bytes = bytes;
  std::snprintf(mine.unit, sizeof(mine.unit), "%s", bucket.name.c_str());
  lane_.communicator().announce(bucket.gather_label, 0);
  lane_.communicator().host_all_gather(lane_.stream(), &mine, all_.data(), sizeof(mine));
  lane_.stream().record(*compared_);
  compared_->synchronize(device_.timeout(),
                         "the comparison of " + mine.describe() + " on all ranks");
  lane_.communicator().check();
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    const Announcement& theirs = all_[rank];
    FSDP_CHECK(std::memcmp(&theirs, &mine, sizeof(mine)) == 0, "As all-gather ", mine.sequence,
               " of the first iteration, rank ", lane_.communicator().rank(), " issues ",
               mine.describe(), " but rank ", rank, " issues ", theirs.describe(),
               ". All ranks must run the same units, in the same order and of the same sizes. Make "
               "the model and its control flow the same on every rank.");
  }
}

void OrderCheck::compare(const Partition& partition,
                         const std::vector<std::unique_ptr<Unit>>& units) {
  static const std::string kWhat = "the comparison of the buckets";
  *my_order_ = Order(partition, units);
  lane_.communicator().announce(kWhat, 0);
  lane_.communicator().host_all_gather(lane_.stream(), my_order_.get(), all_orders_.data(),
                                       sizeof(Order));
  lane_.stream().record(*compared_);
  compared_->synchronize(device_.timeout(), kWhat);
  lane_.communicator().check();
  for (std::size_t rank = 0; rank < all_orders_.size(); ++rank) {
    if (all_orders_[rank].hash != my_order_->hash) {
      throw Error(describe_difference(all_orders_[rank], rank, units));
    }
  }
}

std::string OrderCheck::describe_difference(const Order& theirs, std::size_t rank,
                                            const std::vector<std::unique_ptr<Unit>>& units) const {
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
  const int this_rank = lane_.communicator().rank();
  if (mine != end && mine->unit == other->unit) {
    return detail::concat("All ranks must reduce the same gradients, but those of unit ",
                          name(*mine), " have ", mine->gradient_bytes, " bytes on rank ", this_rank,
                          " and ", other->gradient_bytes, " on rank ", rank,
                          ". Make its modules, fully_shard calls, frozen parameters and mp_policy "
                          "the same on every rank.");
  }
  return detail::concat(
      "All ranks must run the same units in the same order and put them into the same buckets, but "
      "rank ",
      this_rank, " has ", mine != end ? name(*mine) : "other units", " where rank ", rank, " has ",
      mine != end ? name(*other) : "others",
      ". Make the model, its control flow and its settings the same on every rank. A rank that "
      "leaves a unit out on purpose calls its join_empty().");
}

}  // namespace fsdp
