#include "core/backward_exchange.h"

#include <algorithm>
#include <cstring>

namespace fsdp {
namespace {

const std::string kExchange = "the exchange of all ranks at the end of backward";
const std::string kHistories = "the exchange of all ranks' last collectives";

bool has_bit(const char* bits, std::size_t i) { return ((bits[i / 8] >> (i % 8)) & 1) != 0; }

void set_bit(char* bits, std::size_t i) {
  bits[i / 8] = static_cast<char>(bits[i / 8] | (1 << (i % 8)));
}

bool misses_gradients(const Unit& unit) {
  return unit.is_reduced && std::find(unit.used.begin(), unit.used.end(), 0) != unit.used.end();
}

}  // namespace

BackwardExchange::BackwardExchange(Lanes& lanes, bool has_peers)
    : lanes_(lanes),
      has_peers_(has_peers && lanes.gather.communicator().size() > 1),
      received_(lanes.device->new_event()) {}

BackwardExchange::~BackwardExchange() {
  if (is_in_flight_) {
    lanes_.gather.drain();
  }
}

void BackwardExchange::begin(const std::vector<std::unique_ptr<Unit>>& units) {
  const auto is_reduced = [](const auto& unit) { return unit->is_reduced; };
  // A captured graph replays one step, whose ranks were compared in the steps before.
  if (!has_peers_ || lanes_.device->is_capturing() ||
      std::none_of(units.begin(), units.end(), is_reduced)) {
    return;
  }
  receive();
  send(units);
  lanes_.gather.history().end_iteration();
  lanes_.reduce.history().end_iteration();
}

void BackwardExchange::end(const std::vector<std::unique_ptr<Unit>>& units) {
  const bool any_missing = std::any_of(units.begin(), units.end(),
                                       [](const auto& unit) { return misses_gradients(*unit); });
  if (!lanes_.device->is_capturing() && (any_missing || lanes_.device->waits_on_host())) {
    receive();
  }
  if (any_missing) {
    set_gradients_of_others(units);
  }
}

void BackwardExchange::send(const std::vector<std::unique_ptr<Unit>>& units) {
  resize(units);
  auto* message = static_cast<char*>(mine_.get());
  std::memset(message, 0, message_bytes_);
  const Hashes hashes{lanes_.gather.history().hash(), lanes_.reduce.history().hash()};
  std::memcpy(message, &hashes, sizeof(hashes));
  std::size_t bit = 0;
  for (const auto& unit : units) {
    for (const char used : unit->used) {
      if (used != 0) {
        set_bit(message + sizeof(Hashes), bit);
      }
      bit += 1;
    }
  }
  Lane& lane = lanes_.gather;
  lane.communicator().announce(kExchange, 0);
  lane.communicator().host_all_gather(lane.stream(), message, all_.get(), message_bytes_);
  lane.stream().record(*received_);
  is_in_flight_ = true;
}

// Waits for the messages of the last exchange and reads them, if that has not happened yet.
void BackwardExchange::receive() {
  if (!is_in_flight_) {
    return;
  }
  received_->synchronize(lanes_.device->timeout(), kExchange);
  is_in_flight_ = false;
  compare_hashes();
  std::fill(used_by_any_.begin(), used_by_any_.end(), 0);
  const auto ranks = static_cast<std::size_t>(lanes_.gather.communicator().size());
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const char* bits = message_of(rank) + sizeof(Hashes);
    for (std::size_t i = 0; i < used_by_any_.size(); ++i) {
      used_by_any_[i] = static_cast<char>(used_by_any_[i] | bits[i]);
    }
  }
}

void BackwardExchange::compare_hashes() {
  Communicator& communicator = lanes_.gather.communicator();
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (std::memcmp(message_of(static_cast<std::size_t>(rank)), message_of(0), sizeof(Hashes)) !=
        0) {
      // Every rank finds the same first rank that differs from rank 0, and comes here.
      throw_difference(communicator.rank() == 0 ? rank : 0);
    }
  }
}

void BackwardExchange::throw_difference(int other_rank) {
  struct Histories {
    CollectiveHistory::Records gather;
    CollectiveHistory::Records reduce;
  };
  Lane& lane = lanes_.gather;
  const int rank = lane.communicator().rank();
  auto mine = std::make_shared<Histories>(
      Histories{lanes_.gather.history().records(), lanes_.reduce.history().records()});
  auto all = std::make_shared<std::vector<Histories>>(
      static_cast<std::size_t>(lane.communicator().size()));
  lane.communicator().announce(kHistories, 0);
  lane.communicator().host_all_gather(lane.stream(), mine.get(), all->data(), sizeof(Histories));
  lane.synchronize();
  Hashes ours;
  Hashes theirs;
  std::memcpy(&ours, message_of(static_cast<std::size_t>(rank)), sizeof(ours));
  std::memcpy(&theirs, message_of(static_cast<std::size_t>(other_rank)), sizeof(theirs));
  const Histories& other = (*all)[static_cast<std::size_t>(other_rank)];
  throw Error(ours.gather != theirs.gather
                  ? describe_difference("gather", rank, mine->gather, other_rank, other.gather)
                  : describe_difference("reduce", rank, mine->reduce, other_rank, other.reduce));
}

void BackwardExchange::set_gradients_of_others(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t bit = 0;
  for (const auto& unit : units) {
    for (std::size_t i = 0; i < unit->used.size(); ++i, ++bit) {
      if (unit->is_reduced && unit->used[i] == 0 && bit / 8 < used_by_any_.size() &&
          has_bit(used_by_any_.data(), bit)) {
        unit->port.set_sharded_gradient(i);
      }
    }
  }
}

// Allocates for the first message, and again only if units were added.
void BackwardExchange::resize(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t bits = 0;
  for (const auto& unit : units) {
    bits += unit->used.size();
  }
  const std::size_t bytes = (bits + 7) / 8;
  if (mine_ != nullptr && used_by_any_.size() == bytes) {
    return;
  }
  used_by_any_.assign(bytes, 0);
  message_bytes_ = sizeof(Hashes) + bytes;
  const auto ranks = static_cast<std::size_t>(lanes_.gather.communicator().size());
  mine_ = lanes_.device->allocate_on_host(message_bytes_);
  all_ = lanes_.device->allocate_on_host(message_bytes_ * ranks);
}

char* BackwardExchange::message_of(std::size_t rank) const {
  return static_cast<char*>(all_.get()) + rank * message_bytes_;
}

}  // namespace fsdp
