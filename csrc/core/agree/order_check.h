// Compares across ranks what the schedule is about to do. Ranks that run units in different orders
// or of different sizes get an error message instead of a hang or wrong numbers. Each comparison
// costs a round trip, so the pipeline compares the buckets, and the gathers of the first forward
// and the first backward. Reductions are compared later, since ranks that leave parameters unused
// issue them later than others, relative to gathers: Note [collective tags] in
// core/record/collective_history.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/agree/rank_exchange.h"
#include "core/lanes.h"
#include "core/units/bucket.h"
#include "core/units/merging.h"

namespace fsdp {

class OrderCheck {
 public:
  // Both outlive this object.
  OrderCheck(Lanes& lanes, RankExchange& exchange);

  // Whether collectives of this pass are still compared.
  bool is_due(bool in_backward) const {
    return in_backward ? !backward_is_compared_ : !forward_is_compared_;
  }
  void end_forward() { forward_is_compared_ = true; }
  void end_backward() { backward_is_compared_ = true; }

  // Blocks until all ranks have said what their next gather is. Throws if they differ.
  void compare(const Bucket& bucket);
  // Does the same for the buckets that are about to be formed.
  void compare(const Partition& partition, const std::vector<std::unique_ptr<Unit>>& units);

 private:
  struct Announcement;
  struct Order;

  std::string describe_difference(const Order& my_order, const Order& theirs, std::size_t rank,
                                  const std::vector<std::unique_ptr<Unit>>& units) const;

  Lanes& lanes_;
  RankExchange& exchange_;
  bool forward_is_compared_ = false;
  bool backward_is_compared_ = false;
  std::uint64_t sequence_ = 0;
};

}  // namespace fsdp
