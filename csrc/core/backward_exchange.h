// What ranks tell each other at the end of a backward that reduced gradients: which parameters got
// one, and which collectives they have issued. It is one small message on the gather lane, which is
// idle then, so it travels beside the last reduction.
//
// Note [parameters that some ranks do not use]
// A rank that did not use a parameter, an expert say, sends zeros for it. So the sum is right on
// every rank, but a rank cannot tell from the sum whether the parameter has a gradient. It does if
// any rank used it. Otherwise its .grad stays as it is, None for example, and the optimizer leaves
// the parameter alone. So each rank sends one bit for each trainable parameter. Ranks that used
// every parameter need no answer, and on a GPU their host does not wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/lanes.h"
#include "core/unit.h"

namespace fsdp {

class BackwardExchange {
 public:
  // Without peers (simulated ranks) nothing is sent.
  BackwardExchange(Lanes& lanes, bool has_peers);
  // Work in flight uses the buffers that are freed now.
  ~BackwardExchange();

  BackwardExchange(const BackwardExchange&) = delete;
  BackwardExchange& operator=(const BackwardExchange&) = delete;

  // Call both at the end of each backward. `begin` sends the message if this backward reduced
  // gradients (Unit::is_reduced, Unit::used). `end` sets the sharded gradients of parameters that
  // only other ranks used. Both throw if ranks have issued different
  // collectives. If the host did not wait for the answer, the next backward throws.
  void begin(const std::vector<std::unique_ptr<Unit>>& units);
  void end(const std::vector<std::unique_ptr<Unit>>& units);

 private:
  struct Hashes {
    std::uint64_t gather;
    std::uint64_t reduce;
  };

  void send(const std::vector<std::unique_ptr<Unit>>& units);
  void receive();
  void compare_hashes();
  [[noreturn]] void throw_difference(int other_rank);
  void set_gradients_of_others(const std::vector<std::unique_ptr<Unit>>& units);
  void resize(const std::vector<std::unique_ptr<Unit>>& units);
  char* message_of(std::size_t rank) const;

  Lanes& lanes_;
  bool has_peers_;
  std::unique_ptr<Event> received_;
  bool is_in_flight_ = false;
  std::size_t message_bytes_ = 0;
  std::shared_ptr<void> mine_;     // hashes, then bits
  std::shared_ptr<void> all_;      // of every rank
  std::vector<char> used_by_any_;  // one bit for each trainable parameter of the model
};

}  // namespace fsdp
