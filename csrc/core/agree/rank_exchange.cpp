#include "core/agree/rank_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/record/flight_recorder.h"

namespace fsdp {
namespace {

const std::string kExchange = "the exchange of all ranks at the end of backward";
const std::string kHistories = "the exchange of all ranks' last collectives";

bool has_bit(const char* bits, std::size_t i) { return ((bits[i / 8] >> (i % 8)) & 1) != 0; }

void set_bit(char* bits, std::size_t i) {
  bits[i / 8] = static_cast<char>(bits[i / 8] | (1 << (i % 8)));
}

}  // namespace

RankExchange::RankExchange(Lanes& lanes, Lanes* replicas, bool has_peers,
                           std::vector<int> mesh_ranks)
    : lanes_(lanes),
      replicas_(replicas),
      has_peers_(has_peers && size() > 1),
      mesh_ranks_(std::move(mesh_ranks)),
      group_received_(lanes.device->new_event()),
      received_(lanes.device->new_event()) {}

RankExchange::~RankExchange() {
  if (!is_in_flight_ && unanswered_.empty()) {
    return;
  }
  lanes_.gather.drain();
  if (replicas_ != nullptr) {
    replicas_->gather.drain();
  }
}

std::size_t RankExchange::size() const {
  const int replicas = replicas_ != nullptr ? replicas_->gather.communicator().size() : 1;
  return static_cast<std::size_t>(replicas * lanes_.gather.communicator().size());
}

std::size_t RankExchange::rank() const {
  const int replica = replicas_ != nullptr ? replicas_->gather.communicator().rank() : 0;
  const Communicator& communicator = lanes_.gather.communicator();
  return static_cast<std::size_t>(replica * communicator.size() + communicator.rank());
}

int RankExchange::global_rank(std::size_t place) const {
  return mesh_ranks_.empty() ? static_cast<int>(place) : mesh_ranks_.at(place);
}

void RankExchange::gather_from_all(const std::string& what, const void* mine, void* of_group,
                                   void* all, std::size_t bytes) {
  Lane& lane = lanes_.gather;
  lane.host_all_gather(what, what, mine, replicas_ != nullptr ? of_group : all, bytes);
  if (replicas_ == nullptr) {
    lane.stream().record(*received_);
    return;
  }
  lane.stream().record(*group_received_);
  Lane& across = replicas_->gather;
  across.stream().wait(*group_received_, what);
  across.host_all_gather(what, what, of_group, all,
                         bytes * static_cast<std::size_t>(lane.communicator().size()));
  across.stream().record(*received_);
}

void RankExchange::join(Stream& compute) {
  if (has_peers_) {
    compute.wait(*received_, kExchange);
  }
}

std::vector<std::string> RankExchange::all_gather(const std::string& what,
                                                  const std::string& mine) {
  if (!has_peers_) {
    return {mine};
  }
  const std::string& label = *labels_.insert(what).first;
  const std::size_t bytes = mine.size();
  const auto group_size = static_cast<std::size_t>(lanes_.gather.communicator().size());
  // Not pinned: to free pinned memory, CUDA may wait for reductions, whose ranks may wait for this
  // one.
  const char* const sent = unanswered_.emplace_back(mine).data();
  char* const of_group = unanswered_.emplace_back(bytes * group_size, '\0').data();
  char* const received = unanswered_.emplace_back(bytes * size(), '\0').data();
  gather_from_all(label, sent, of_group, received, bytes);
  received_->synchronize(lanes_.device->timeout(), label);
  check_communicators();
  std::vector<std::string> messages;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    messages.emplace_back(received + rank * bytes, bytes);
  }
  unanswered_.clear();
  return messages;
}

void RankExchange::begin(const std::vector<std::unique_ptr<Unit>>& units) {
  const auto is_reduced = [](const auto& unit) { return unit->gradients.is_reduced(); };
  // A captured graph replays one step, whose ranks were compared in earlier steps.
  if (!has_peers_ || lanes_.device->is_capturing() ||
      std::none_of(units.begin(), units.end(), is_reduced)) {
    return;
  }
  receive();
  send(units);
  lanes_.gather.history().end_iteration();
  lanes_.reduce.history().end_iteration();
  if (replicas_ != nullptr) {
    replicas_->reduce.history().end_iteration();
  }
}

void RankExchange::end(const std::vector<std::unique_ptr<Unit>>& units) {
  const bool any_missing = std::any_of(units.begin(), units.end(), [](const auto& unit) {
    return unit->gradients.misses_gradients();
  });
  if (!lanes_.device->is_capturing() && (any_missing || lanes_.device->is_host())) {
    receive();
  }
  if (any_missing) {
    set_gradients_of_others(units);
  }
}

void RankExchange::send(const std::vector<std::unique_ptr<Unit>>& units) {
  resize(units);
  auto* message = static_cast<char*>(mine_.get());
  std::memset(message, 0, message_bytes_);
  const Hashes hashes{lanes_.gather.history().hash(), lanes_.reduce.history().hash(),
                      replicas_ != nullptr ? replicas_->reduce.history().hash() : 0};
  std::memcpy(message, &hashes, sizeof(hashes));
  std::size_t bit = 0;
  for (const auto& unit : units) {
    for (const char used : unit->gradients.used()) {
      if (used != 0) {
        set_bit(message + sizeof(Hashes), bit);
      }
      bit += 1;
    }
  }
  is_in_flight_ = true;
  gather_from_all(kExchange, message, of_group_.get(), all_.get(), message_bytes_);
}

// Collectives that were aborted have ended without messages.
void RankExchange::check_communicators() {
  lanes_.gather.communicator().check();
  if (replicas_ != nullptr) {
    replicas_->gather.communicator().check();
  }
}

// Waits for the messages of the last exchange and reads them, if that has not happened yet.
void RankExchange::receive() {
  if (!is_in_flight_) {
    return;
  }
  received_->synchronize(lanes_.device->timeout(), kExchange);
  check_communicators();
  is_in_flight_ = false;
  compare_hashes();
  std::fill(used_by_any_.begin(), used_by_any_.end(), 0);
  for (std::size_t rank = 0; rank < size(); ++rank) {
    const char* bits = message_of(rank) + sizeof(Hashes);
    for (std::size_t i = 0; i < used_by_any_.size(); ++i) {
      used_by_any_[i] = static_cast<char>(used_by_any_[i] | bits[i]);
    }
  }
}

// The ranks of one shard group issue the same gathers and reductions. Two shard groups may issue
// different ones, for example if one of them evaluates more batches. All ranks issue the same
// all-reductions.
void RankExchange::compare_hashes() {
  const auto group_size = static_cast<std::size_t>(lanes_.gather.communicator().size());
  for (std::size_t other = 0; other < size(); ++other) {
    const std::size_t first = other / group_size * group_size;
    // All ranks compare the same numbers, so all of them throw.
    if (hashes_of(other).gather != hashes_of(first).gather) {
      throw_difference("gather", lanes_.gather.history(), other, first);
    }
    if (hashes_of(other).reduce != hashes_of(first).reduce) {
      throw_difference("reduce", lanes_.reduce.history(), other, first);
    }
    if (replicas_ != nullptr && hashes_of(other).all_reduce != hashes_of(0).all_reduce) {
      throw_difference("all-reduce", replicas_->reduce.history(), other, 0);
    }
  }
}

RankExchange::Hashes RankExchange::hashes_of(std::size_t rank) const {
  Hashes hashes;
  std::memcpy(&hashes, message_of(rank), sizeof(hashes));
  return hashes;
}

void RankExchange::throw_difference(const char* lane, const CollectiveHistory& mine,
                                    std::size_t one, std::size_t another) {
  const auto all = of_all(kHistories, mine.records());
  const std::size_t shown = rank() == one ? one : another;  // this rank, if it is one of the two
  const std::size_t other = rank() == one ? another : one;
  throw RanksDiffer(
      describe_difference(lane, global_rank(shown), all[shown], global_rank(other), all[other]));
}

void RankExchange::set_gradients_of_others(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t bit = 0;
  for (const auto& unit : units) {
    for (std::size_t i = 0; i < unit->gradients.used().size(); ++i, ++bit) {
      if (unit->gradients.is_reduced() && unit->gradients.used()[i] == 0 && is_used(*unit, bit)) {
        unit->port.set_sharded_gradient(i);
      }
    }
  }
}

// Whether any rank of the unit's mesh used the parameter. See Note [several meshes] in
// core/lanes.h.
bool RankExchange::is_used(const Unit& unit, std::size_t bit) const {
  if (bit / 8 >= used_by_any_.size()) {
    return false;  // no messages were sent yet
  }
  const Mesh* mesh = lanes_.mesh(unit.mesh);
  if (mesh == nullptr) {
    return has_bit(used_by_any_.data(), bit);
  }
  // The mesh's ranks count within a shard group, and are the same numbers in every shard group.
  const auto group_size = static_cast<std::size_t>(lanes_.gather.communicator().size());
  for (std::size_t first = 0; first < size(); first += group_size) {
    for (const int rank : mesh->ranks) {
      const char* bits = message_of(first + static_cast<std::size_t>(rank)) + sizeof(Hashes);
      if (has_bit(bits, bit)) {
        return true;
      }
    }
  }
  return false;
}

// Allocates for the first message, and again only if units were added.
void RankExchange::resize(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t bits = 0;
  for (const auto& unit : units) {
    bits += unit->gradients.used().size();
  }
  const std::size_t bytes = (bits + 7) / 8;
  if (mine_ != nullptr && used_by_any_.size() == bytes) {
    return;
  }
  used_by_any_.assign(bytes, 0);
  message_bytes_ = sizeof(Hashes) + bytes;
  mine_ = lanes_.device->allocate_on_host(message_bytes_);
  all_ = lanes_.device->allocate_on_host(message_bytes_ * size());
  if (replicas_ != nullptr) {
    const auto group_size = static_cast<std::size_t>(lanes_.gather.communicator().size());
    of_group_ = lanes_.device->allocate_on_host(message_bytes_ * group_size);
  }
}

char* RankExchange::message_of(std::size_t rank) const {
  return static_cast<char*>(all_.get()) + rank * message_bytes_;
}

}  // namespace fsdp
