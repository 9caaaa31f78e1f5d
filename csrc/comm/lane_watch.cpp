#include "comm/lane_watch.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {

std::string what_ranks_do(const std::vector<Peer>& peers) {
  constexpr std::size_t kMost = 8;  // ranks in the message
  std::string text = "Now ";
  for (std::size_t i = 0; i < std::min(peers.size(), kMost); ++i) {
    std::string labels;
    for (const Mailbox* mailbox : peers[i].mailboxes) {
      if (mailbox->activity.is_busy()) {
        labels += (labels.empty() ? "" : " and ") + mailbox->activity.label();
      }
    }
    text += detail::concat(i == 0 ? "" : ", ", "rank ", peers[i].global_rank, " is in ",
                           labels.empty() ? "no collective" : labels);
  }
  return text + (peers.size() > kMost ? ", and so on." : ".");
}

bool LaneWatch::LaneState::operator==(const LaneState& other) const {
  return blocked == other.blocked && issuer == other.issuer && issued == other.issued &&
         begun == other.begun && ended == other.ended && posted == other.posted;
}

bool LaneWatch::RankState::operator==(const RankState& other) const {
  return lanes[0] == other.lanes[0] && lanes[1] == other.lanes[1];
}

bool LaneWatch::Deadlock::operator==(const Deadlock& other) const {
  return ranks[0] == other.ranks[0] && ranks[1] == other.ranks[1] && states[0] == other.states[0] &&
         states[1] == other.states[1];
}

bool LaneWatch::RankState::is_stuck_in(int lane) const {
  const LaneState& in = lanes[lane];
  const LaneState& other = lanes[1 - lane];
  const bool one_thread_issues = in.issuer == other.issuer && in.issuer != Issuer::kSeveral;
  return in.is_busy() && other.is_idle() && in.blocked != Issuer::kNobody && one_thread_issues &&
         in.blocked == in.issuer;
}

// `blocked` is read first: a thread that is blocked has published what it issued before.
LaneWatch::RankState LaneWatch::state_of(const Peer& peer) {
  RankState state;
  for (int lane : {0, 1}) {
    state.lanes[lane].blocked =
        peer.mailboxes[lane]->issuer.blocked.load(std::memory_order_acquire);
  }
  for (int lane : {0, 1}) {
    const Mailbox& mailbox = *peer.mailboxes[lane];
    LaneState& at = state.lanes[lane];
    at.issuer = mailbox.issuer.thread.load(std::memory_order_relaxed);
    at.issued = mailbox.issuer.issued.load(std::memory_order_relaxed);
    at.ended = mailbox.activity.ended();
    at.begun = mailbox.activity.begun();
    at.posted = mailbox.posted.load(std::memory_order_acquire);
  }
  return state;
}

// A collective can only end if all ranks have posted all of its rounds. So in each lane the rank
// that is stuck there has to be one round ahead of the other rank.
LaneWatch::Deadlock LaneWatch::find_deadlock() const {
  std::vector<std::pair<int, RankState>> stuck[2];
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const RankState state = state_of(peers_[i]);
    for (int lane : {0, 1}) {
      if (state.is_stuck_in(lane)) {
        stuck[lane].emplace_back(static_cast<int>(i), state);
      }
    }
  }
  for (const auto& [a, of_a] : stuck[0]) {
    for (const auto& [b, of_b] : stuck[1]) {
      if (of_a.lanes[0].posted - of_b.lanes[0].posted == 1 &&
          of_b.lanes[1].posted - of_a.lanes[1].posted == 1) {
        return {{a, b}, {of_a, of_b}};
      }
    }
  }
  return {};
}

const Mailbox* LaneWatch::find_failed() const {
  for (const Peer& peer : peers_) {
    for (const Mailbox* mailbox : {&peer.mailbox(), &peer.of_other_lane()}) {
      if (state_in(*mailbox, peer.memory.who) == Mailbox::State::Failed) {
        return mailbox;
      }
    }
  }
  return nullptr;
}

void LaneWatch::look(Time now) {
  const bool had_deadlock = deadlock_.ranks[0] >= 0;
  const Deadlock found = find_deadlock();
  if (!(found == deadlock_)) {
    deadlock_ = found;
    deadlock_since_ = now;
  }
  if (failed_ == nullptr) {
    failed_ = find_failed();
    failed_since_ = now;
  }
  // The reason is passed on unchanged. It may be the account of a deadlock that this rank was about
  // to give itself.
  if (failed_ != nullptr && (had_deadlock || now - failed_since_ >= unchanged_)) {
    throw Error(reason_in(*failed_));
  }
  if (deadlock_.ranks[0] >= 0 && now != deadlock_since_ && now - deadlock_since_ >= unchanged_) {
    throw_deadlock();
  }
}

// The same text on all ranks.
void LaneWatch::throw_deadlock() const {
  const auto [first, second] = std::minmax(deadlock_.ranks[0], deadlock_.ranks[1]);
  const auto name = [this](int rank) { return peers_[static_cast<std::size_t>(rank)].global_rank; };
  throw Error(detail::concat("ranks ", name(first), " and ", name(second),
                             " wait for each other, so neither can go on. ", what_ranks_do(peers_),
                             " Run the same forwards and backwards in the same order on every "
                             "rank."));
}

}  // namespace fsdp
