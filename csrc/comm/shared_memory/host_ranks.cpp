#include "comm/shared_memory/host_ranks.h"

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

template <typename Call>
auto of_host(const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw HostFailure(error.what());
  }
}

int place_of(const HostMap& map, int rank) {
  const std::vector<int>& ranks = map.ranks_beside(rank);
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

HostRanks::HostRanks(std::shared_ptr<Arena> arena, Mailbox& mine, std::vector<Peer> peers,
                     HostMap map, int rank, std::chrono::milliseconds timeout)
    : arena_(std::move(arena)),
      map_(std::move(map)),
      places_(map_.hosts().size(), -1),
      barrier_(mine, std::move(peers), place_of(map_, rank), timeout) {
  const std::vector<int>& ranks = map_.ranks_beside(rank);
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    places_[static_cast<std::size_t>(ranks[place])] = static_cast<int>(place);
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  others_.assign(own + 1, ranks.end());
  others_.insert(others_.end(), ranks.begin(), own);
}

void HostRanks::begin(const std::string& what, std::uint64_t tag) {
  of_host([&] { barrier_.begin_collective(what, tag); });
}

void HostRanks::post(const void* memory, std::size_t reach, Operation::Kind kind, DType dtype,
                     std::size_t bytes) {
  posted_ = {};
  posted_.kind = kind;
  posted_.dtype = dtype;
  posted_.bytes = bytes;
  posted_.offset = arena_->offset_of(memory);
  posted_.after = reach;
  barrier_.post(posted_);
}

const char* HostRanks::offer_of(int from) {
  return of_host(
      [&] { return barrier_.wait_for_input(places_[static_cast<std::size_t>(from)], posted_); });
}

void HostRanks::finish() {
  of_host([&] { barrier_.finish(); });
}

}  // namespace fsdp
