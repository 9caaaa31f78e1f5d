#include "core/order_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fsdp {

struct OrderCheck::Announcement {
  std::string describe() const {
    return detail::concat("the ", op, " of unit '", unit, "' (", bytes, " bytes)");
  }

  std::uint64_t sequence;
  std::uint64_t bytes;
  char op[16];
  char unit[96];
};

// A partition as ranks compare it: its first unit numbers, bucket by bucket, and a hash of all.
struct OrderCheck::Order {
  static constexpr std::size_t kMost = 120;
  static constexpr std::int32_t kNextBucket = -1;
  static constexpr std::int32_t kNone = -2;

  explicit Order(const Partition& partition = {}) {
    std::fill_n(units, kMost, kNone);
    std::size_t count = 0;
    const auto add = [&](std::int32_t unit) {
      hash = (hash ^ static_cast<std::uint64_t>(unit + 3)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
      if (count < kMost) {
        units[count++] = unit;
      }
    };
    for (const std::vector<int>& bucket : partition) {
      for (const int unit : bucket) {
        add(unit);
      }
      add(kNextBucket);
    }
  }

  std::uint64_t hash = 0;
  std::int32_t units[kMost];
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

void OrderCheck::compare(const char* op, const Bucket& bucket, std::size_t bytes) {
  FSDP_CHECK(!device_.is_capturing(),
             "A CUDA graph cannot capture the first iteration, which compares the ranks. Run a few "
             "whole steps before capturing one.");
  Announcement& mine = *mine_;
  mine = {};
  mine.sequence = ++sequence_;
  mine.bytes = bytes;
  std::snprintf(mine.op, sizeof(mine.op), "%s", op);
  std::snprintf(mine.unit, sizeof(mine.unit), "%s", bucket.name.c_str());
  const bool gathers = std::strcmp(op, "all-gather") == 0;
  lane_.communicator().announce(gathers ? bucket.gather_label : bucket.reduce_label, 0);
  lane_.communicator().host_all_gather(lane_.stream(), &mine, all_.data(), sizeof(mine));
  lane_.stream().record(*compared_);
  compared_->synchronize(device_.timeout(),
                         "the comparison of " + mine.describe() + " on all ranks");
  lane_.communicator().check();
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    const Announcement& theirs = all_[rank];
    FSDP_CHECK(std::memcmp(&theirs, &mine, sizeof(mine)) == 0, "As collective ", mine.sequence,
               " of the first iteration, rank ", lane_.communicator().rank(), " issues ",
               mine.describe(), " but rank ", rank, " issues ", theirs.describe(),
               ". All ranks must run the same units, in the same order and of the same sizes. Make "
               "the model and its control flow the same on every rank.");
  }
}

void OrderCheck::compare(const Partition& partition,
                         const std::vector<std::unique_ptr<Unit>>& units) {
  static const std::string kWhat = "the comparison of the buckets";
  *my_order_ = Order(partition);
  lane_.communicator().announce(kWhat, 0);
  lane_.communicator().host_all_gather(lane_.stream(), my_order_.get(), all_orders_.data(),
                                       sizeof(Order));
  lane_.stream().record(*compared_);
  compared_->synchronize(device_.timeout(), kWhat);
  lane_.communicator().check();
  const auto name = [&units](std::int32_t unit) -> std::string {
    if (unit == Order::kNextBucket || unit == Order::kNone) {
      return unit == Order::kNone ? "no more" : "another bucket";
    }
    const auto number = static_cast<std::size_t>(unit);
    return number < units.size() ? "'" + units[number]->name + "'" : "a unit more";
  };
  for (std::size_t rank = 0; rank < all_orders_.size(); ++rank) {
    const Order& theirs = all_orders_[rank];
    if (theirs.hash == my_order_->hash) {
      continue;
    }
    const auto [mine, other] =
        std::mismatch(my_order_->units, my_order_->units + Order::kMost, theirs.units);
    const bool is_seen = mine != my_order_->units + Order::kMost;
    const int this_rank = lane_.communicator().rank();
    throw Error(detail::concat(
        "All ranks must run the same units in the same order and put them into the same buckets, "
        "but "
        "rank ",
        this_rank, " has ", is_seen ? name(*mine) : "other units", " where rank ", rank, " has ",
        is_seen ? name(*other) : "others",
        ". Make the model, its control flow and its settings the same on every rank."));
  }
}

}  // namespace fsdp
