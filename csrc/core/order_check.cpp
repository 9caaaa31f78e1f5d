#include "core/order_check.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "core/check.h"

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

OrderCheck::OrderCheck(Device& device, Lane& lane)
    : device_(device),
      lane_(lane),
      compared_(device.new_event()),
      mine_(std::make_unique<Announcement>()),
      all_(static_cast<std::size_t>(lane.communicator().size())) {}

OrderCheck::~OrderCheck() = default;

void OrderCheck::compare(const char* op, const Bucket& bucket, std::size_t bytes) {
  FSDP_CHECK(!device_.is_capturing(),
             "the first iteration compares the ranks, which a CUDA graph cannot capture; run a few "
             "whole steps before capturing one");
  Announcement& mine = *mine_;
  mine = {};
  mine.sequence = ++sequence_;
  mine.bytes = bytes;
  std::snprintf(mine.op, sizeof(mine.op), "%s", op);
  std::snprintf(mine.unit, sizeof(mine.unit), "%s", bucket.name.c_str());
  const bool gathers = std::strcmp(op, "all-gather") == 0;
  lane_.communicator().announce(gathers ? bucket.gather_label : bucket.reduce_label);
  lane_.communicator().host_all_gather(lane_.stream(), &mine, all_.data(), sizeof(mine));
  lane_.stream().record(*compared_);
  compared_->synchronize(device_.timeout(),
                         "all ranks to announce " + mine.describe() +
                             " (a rank that skips a unit, or has failed, never does)");
  lane_.communicator().check();
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    const Announcement& theirs = all_[rank];
    FSDP_CHECK(std::memcmp(&theirs, &mine, sizeof(mine)) == 0,
               "all ranks are expected to run the same units in the same order and sizes, but as "
               "collective ",
               mine.sequence, " of the first iteration rank ", lane_.communicator().rank(),
               " issues ", mine.describe(), " where rank ", rank, " issues ", theirs.describe(),
               "; make the model and its control flow the same on every rank");
  }
}

}  // namespace fsdp
