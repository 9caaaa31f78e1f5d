#include "comm/liveness/lane_state.h"

#include <algorithm>

#include "base/check.h"

namespace fsdp {

bool LaneState::operator==(const LaneState& other) const {
  return blocked == other.blocked && issuer == other.issuer && issued == other.issued &&
         begun == other.begun && ended == other.ended && posted == other.posted;
}

bool RankState::operator==(const RankState& other) const {
  return lanes[0] == other.lanes[0] && lanes[1] == other.lanes[1];
}

bool RankState::is_stuck_in(int lane) const {
  const LaneState& in = lanes[lane];
  const LaneState& other = lanes[1 - lane];
  const bool one_thread_issues = in.issuer != Issuer::kSeveral &&
                                 (other.issuer == in.issuer || other.issuer == Issuer::kNobody);
  return in.is_busy() && other.is_idle() && in.blocked != Issuer::kNobody && one_thread_issues &&
         in.blocked == in.issuer;
}

// `blocked` is read first: a thread that is blocked has published what it issued before.
RankState rank_state_in(const Mailbox* const (&mailboxes)[2]) {
  RankState state;
  for (int lane : {0, 1}) {
    state.lanes[lane].blocked = mailboxes[lane]->issuer.blocked.load(std::memory_order_acquire);
  }
  for (int lane : {0, 1}) {
    const Mailbox& mailbox = *mailboxes[lane];
    LaneState& at = state.lanes[lane];
    at.issuer = mailbox.issuer.thread.load(std::memory_order_relaxed);
    at.issued = mailbox.issuer.issued.load(std::memory_order_relaxed);
    at.ended = mailbox.activity.ended();
    at.begun = mailbox.activity.begun();
    at.posted = mailbox.posted.load(std::memory_order_acquire);
  }
  return state;
}

bool wait_for_each_other(const RankState& stuck_in_0, const RankState& stuck_in_1) {
  return stuck_in_0.lanes[0].posted - stuck_in_1.lanes[0].posted == 1 &&
         stuck_in_1.lanes[1].posted - stuck_in_0.lanes[1].posted == 1;
}

std::string account_of_deadlock(int first_rank, int second_rank, const std::string& activities) {
  const auto [lower, higher] = std::minmax(first_rank, second_rank);
  return detail::concat("ranks ", lower, " and ", higher,
                        " wait for each other, so neither can go on. ", activities,
                        " Run the same forwards and backwards in the same order on every rank.");
}

}  // namespace fsdp
