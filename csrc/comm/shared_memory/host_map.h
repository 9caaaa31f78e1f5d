// Which ranks of a group share a host.
#pragma once

#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace fsdp {

class HostMap {
 public:
  // `hosts` has the number of each rank's host, from 0 on, by rank.
  explicit HostMap(std::vector<int> hosts) : hosts_(std::move(hosts)), places_(hosts_.size()) {
    ranks_.resize(hosts_.size());
    for (std::size_t rank = 0; rank < hosts_.size(); ++rank) {
      std::vector<int>& beside = ranks_[static_cast<std::size_t>(hosts_[rank])];
      places_[rank] = beside.size();
      beside.push_back(static_cast<int>(rank));
    }
  }

  // Each rank on a host of its own.
  static HostMap of_single_ranks(int ranks) {
    std::vector<int> hosts(static_cast<std::size_t>(ranks));
    std::iota(hosts.begin(), hosts.end(), 0);
    return HostMap(std::move(hosts));
  }

  const std::vector<int>& hosts() const { return hosts_; }
  // The ranks of the host of `rank` in order, `rank` included.
  const std::vector<int>& ranks_beside(int rank) const {
    return ranks_[static_cast<std::size_t>(hosts_[static_cast<std::size_t>(rank)])];
  }
  bool share(int a, int b) const {
    return hosts_[static_cast<std::size_t>(a)] == hosts_[static_cast<std::size_t>(b)];
  }

  // The rank of the host of `rank` that receives what `owner` gathers, and shares it there. These
  // are different ranks for different owners, as far as possible.
  int receiver(int owner, int rank) const {
    const std::vector<int>& beside = ranks_beside(rank);
    return share(owner, rank) ? owner
                              : beside[places_[static_cast<std::size_t>(owner)] % beside.size()];
  }

 private:
  std::vector<int> hosts_;
  std::vector<std::size_t> places_;      // of each rank among those of its host
  std::vector<std::vector<int>> ranks_;  // by host
};

}  // namespace fsdp
