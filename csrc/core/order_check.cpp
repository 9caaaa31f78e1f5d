#include "core/order_check.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "core/check.h"

namespace fsdp {
namespace {

struct Announcement {
  std::uint64_t sequence;
  std::uint64_t bytes;
  char op[16];
  char unit[96];
};

std::string describe(const Announcement& announcement) {
  return detail::concat("the ", announcement.op, " of unit '", announcement.unit, "' (",
                        announcement.bytes, " bytes)");
}

}  // namespace

OrderCheck::OrderCheck(Device& device, Communicator& communicator)
    : device_(device), communicator_(communicator), compared_(device.new_event()) {}

void OrderCheck::compare(Stream& stream, const char* op, const Unit& unit, std::size_t bytes) {
  Announcement mine{};
  mine.sequence = ++sequence_;
  mine.bytes = bytes;
  std::snprintf(mine.op, sizeof(mine.op), "%s", op);
  std::snprintf(mine.unit, sizeof(mine.unit), "%s", unit.name.c_str());
  std::vector<Announcement> all(static_cast<std::size_t>(communicator_.size()));
  communicator_.host_all_gather(stream, &mine, all.data(), sizeof(mine));
  stream.record(*compared_);
  compared_->synchronize(device_.timeout(),
                         "all ranks to announce " + describe(mine) +
                             " (a rank that skips a unit, or has failed, never does)");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Announcement& theirs = all[rank];
    FSDP_CHECK(std::memcmp(&theirs, &mine, sizeof(mine)) == 0,
               "all ranks are expected to run the same units in the same order and sizes, but as "
               "collective ",
               mine.sequence, " of the first iteration rank ", communicator_.rank(), " issues ",
               describe(mine), " where rank ", rank, " issues ", describe(theirs),
               "; make the model and its control flow the same on every rank");
  }
}

}  // namespace fsdp
