// Collectives without peers: each takes as long as it would over a link of given latency and
// bandwidth, on its stream, and moves this rank's own data. What comes out is no result of
// anything; what it is for is time and memory.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.h"

namespace fsdp {

// A collective of S bytes (of all ranks together) takes alpha + S / beta.
struct LinkCost {
  double alpha = 0.0;  // seconds
  double beta = 1.0;   // bytes a second
};

struct SimulatedOptions {
  int rank = 0;
  int size = 1;
  LinkCost gather;  // of all-gathers and broadcasts
  LinkCost reduce;  // of reduce-scatters; an all-reduce takes alpha + 2 S / beta
  // Each takes (1 + jitter * x) times as long, with x drawn from the exponential distribution of
  // mean 1: now and then one is much later than others.
  double jitter = 0.0;
  std::uint64_t seed = 0;
  int multiprocessors = 0;  // that a collective takes from a GPU; 0: it leaves them alone
  GatherBy gather_by = GatherBy::Parameter;
  // Whether a collective reads and writes as much of this device's memory as a real one would,
  // every rank's part being a copy of this one's. Else this rank's own part alone, so that no core
  // of the host is busy with it; the rest of an output stays what it was.
  bool whole_traffic = false;
};

// The device outlives it.
std::unique_ptr<Communicator> make_simulated_communicator(Device& device,
                                                          const SimulatedOptions& options);

}  // namespace fsdp
