#include "comm/liveness/device_lanes.h"

#include <utility>

namespace fsdp {
namespace {

// Stands for the issuing thread. Not Issuer::kNobody, and not Issuer::kSeveral.
constexpr std::uint64_t kDevice = 2;

}  // namespace

void DeviceLanes::publish(int lane, Collective oldest) {
  const std::lock_guard<std::mutex> lock(mutex_);
  oldest_[lane] = std::move(oldest);
}

// The device counts as a thread that is blocked until all work in front of a collective has ended,
// and then issues the collective.
RankState DeviceLanes::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  RankState state;
  for (int lane : {0, 1}) {
    const Collective& mine = oldest_[lane];
    const Collective& other = oldest_[1 - lane];
    const bool exists = mine.number != 0;
    const bool waits = exists && other.number != 0 && mine.behind >= other.number;
    LaneState& at = state.lanes[lane];
    at.issuer = kDevice;
    at.ended = exists ? mine.number - 1 : 0;
    at.begun = at.ended + (exists && !waits ? 1 : 0);
    at.issued = at.begun;
    at.posted = at.begun;
    if (waits) {
      state.lanes[1 - lane].blocked = kDevice;
    }
  }
  return state;
}

std::string DeviceLanes::label(int lane) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return oldest_[lane].what;
}

}  // namespace fsdp
