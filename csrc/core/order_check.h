// Compares across ranks what the schedule is about to do, before it does it: ranks that run units
// in different orders or of different sizes get a sentence instead of a hang or wrong numbers.
// Costs a round trip a collective, so the pipeline does it in the first iteration only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/bucket.h"
#include "core/lanes.h"
#include "core/merging.h"

namespace fsdp {

class OrderCheck {
 public:
  OrderCheck(Device& device, Lane& lane);
  ~OrderCheck();

  // Blocks until all ranks have said what their next collective is; throws where they differ.
  void compare(const char* op, const Bucket& bucket, std::size_t bytes);
  // The same of the buckets that are about to be formed.
  void compare(const Partition& partition, const std::vector<std::unique_ptr<Unit>>& units);

 private:
  struct Announcement;
  struct Order;

  Device& device_;
  Lane& lane_;
  std::unique_ptr<Event> compared_;
  std::uint64_t sequence_ = 0;
  // This rank's and all ranks'. Members, since a wait that timed out leaves them in use.
  std::unique_ptr<Announcement> mine_;
  std::vector<Announcement> all_;
  std::unique_ptr<Order> my_order_;
  std::vector<Order> all_orders_;
};

}  // namespace fsdp
