// Exchanges small messages among all ranks, to compare them. At the end of a backward
// that reduced gradients, one message says which parameters each rank used and which collectives it
// has issued. The gather lane is idle then, so the message overlaps the last reduction. Other
// comparisons use `all_gather`.
//
// Note [parameters that some ranks do not use]
// A rank that did not use a parameter, such as an expert, sends zeros for it. So the sum is right
// on every rank, but it does not tell whether the parameter has a gradient. The parameter has one
// if any rank used it. Otherwise its .grad stays as it is, for example None, and the optimizer
// leaves the parameter alone. So each rank sends one bit for each trainable parameter. Ranks of
// other meshes have other parameters, and do not count: Note [several meshes]. A rank that used
// every parameter needs no answer, and on a GPU its host does not wait for one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/lanes.h"
#include "core/units/unit.h"

namespace fsdp {

class RankExchange {
 public:
  // Without peers (simulated ranks) nothing is sent. `replicas` may be null: Note [replicas] in
  // core/reduce/reducer.h. The ranks of a shard group exchange their messages first. Then each
  // rank exchanges its group's messages with its replicas, so every rank has those of all ranks.
  // `mesh_ranks` has the global rank of each message's sender, for errors. If it is empty, ranks
  // are numbered by the places of their messages.
  RankExchange(Lanes& lanes, Lanes* replicas, bool has_peers, std::vector<int> mesh_ranks = {});
  // Work in flight still uses the buffers that are freed now.
  ~RankExchange();

  RankExchange(const RankExchange&) = delete;
  RankExchange& operator=(const RankExchange&) = delete;

  // Call both at the end of each backward. `begin` sends the message if this backward reduced
  // gradients (Unit::is_reduced, Unit::used). `end` sets the sharded gradients of parameters that
  // only other ranks used. Both throw if ranks have issued different collectives. If the host did
  // not wait for the answer, the next backward throws.
  void begin(const std::vector<std::unique_ptr<Unit>>& units);
  void end(const std::vector<std::unique_ptr<Unit>>& units);

  // Makes the compute stream wait for the last exchange, since a graph may be replayed next: Note
  // [graph capture] in device/cuda_stream.cpp.
  void join(Stream& compute);

  // Sends a message of the same size from every rank to all ranks. Returns the messages of all
  // ranks, sorted by shard group and by rank within it. Errors and timeouts name the exchange by
  // `what`. Without peers it returns `mine` alone.
  std::vector<std::string> all_gather(const std::string& what, const std::string& mine);
  // The same for a struct that can be copied as bytes.
  template <typename T>
  std::vector<T> of_all(const std::string& what, const T& mine) {
    std::vector<T> all;
    for (const std::string& text :
         all_gather(what, {reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
      std::memcpy(&all.emplace_back(), text.data(), sizeof(T));
    }
    return all;
  }
  // The index of this rank's message in the results.
  std::size_t rank() const;
  // The global rank that sent the message in a place.
  int global_rank(std::size_t place) const;

 private:
  struct Hashes {
    std::uint64_t gather;
    std::uint64_t reduce;
    std::uint64_t all_reduce;
  };

  void send(const std::vector<std::unique_ptr<Unit>>& units);
  void check_communicators();
  void receive();
  void compare_hashes();
  Hashes hashes_of(std::size_t rank) const;
  // Reports that the ranks `one` and `another` have issued different collectives on a lane. `mine`
  // is this rank's history of the lane.
  [[noreturn]] void throw_difference(const char* lane, const CollectiveHistory& mine,
                                     std::size_t one, std::size_t another);
  void set_gradients_of_others(const std::vector<std::unique_ptr<Unit>>& units);
  bool is_used(const Unit& unit, std::size_t bit) const;
  void resize(const std::vector<std::unique_ptr<Unit>>& units);
  char* message_of(std::size_t rank) const;

  // The ranks of all shard groups, one after the other, each in order of rank.
  std::size_t size() const;
  // Sends `bytes` from `mine` to all ranks; `all` has every rank's bytes when `received_` is
  // complete. `of_group` is a buffer for the messages of this rank's shard group.
  void gather_from_all(const std::string& what, const void* mine, void* of_group, void* all,
                       std::size_t bytes);

  Lanes& lanes_;
  Lanes* replicas_;
  bool has_peers_;
  std::vector<int> mesh_ranks_;
  std::unique_ptr<Event> group_received_;
  std::unique_ptr<Event> received_;
  std::set<std::string> labels_;  // of messages: communicators refer to them
  bool is_in_flight_ = false;
  std::size_t message_bytes_ = 0;
  std::shared_ptr<void> mine_;          // this rank's message: hashes, then bits
  std::shared_ptr<void> of_group_;      // the messages of the shard group, if there are several
  std::shared_ptr<void> all_;           // the messages of all ranks
  std::deque<std::string> unanswered_;  // buffers of all_gather, which keeps them if it throws
  std::vector<char> used_by_any_;       // one bit for each trainable parameter of the model
};

}  // namespace fsdp
