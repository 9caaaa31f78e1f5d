#include "comm/liveness/lane_watch.h"

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

bool LaneWatch::Deadlock::operator==(const Deadlock& other) const {
  return ranks[0] == other.ranks[0] && ranks[1] == other.ranks[1] && states[0] == other.states[0] &&
         states[1] == other.states[1];
}

LaneWatch::Deadlock LaneWatch::find_deadlock() const {
  std::vector<std::pair<int, RankState>> stuck[2];
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const RankState state = rank_state_in(peers_[i].mailboxes);
    for (int lane : {0, 1}) {
      if (state.is_stuck_in(lane)) {
        stuck[lane].emplace_back(static_cast<int>(i), state);
      }
    }
  }
  for (const auto& [a, of_a] : stuck[0]) {
    for (const auto& [b, of_b] : stuck[1]) {
      if (wait_for_each_other(of_a, of_b)) {
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

void LaneWatch::throw_deadlock() const {
  const auto name = [this](int rank) { return peers_[static_cast<std::size_t>(rank)].global_rank; };
  throw Error(account_of_deadlock(name(deadlock_.ranks[0]), name(deadlock_.ranks[1]),
                                  what_ranks_do(peers_)));
}

}  // namespace fsdp
