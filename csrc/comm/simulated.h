// Collectives without peers. Each keeps its stream busy for as long as it would take over a link of
// a given latency and bandwidth, and moves this rank's own data. The outputs are not results of a
// collective; only the time and the memory traffic are meant to be real.
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
  LinkCost gather;          // of all-gathers
  LinkCost reduce;          // of reduce-scatters; an all-reduce takes alpha + 2 S / beta
  int multiprocessors = 0;  // that a collective occupies on a GPU; 0: none
  // On a GPU, a collective reads and writes as many bytes as a real one. It copies this rank's part
  // into the places of the other ranks. On the host it moves only this rank's part and leaves the
  // rest of the output unchanged, so that cores stay free for compute.
  bool on_gpu = false;
  // If false, collectives take their time but move nothing: the baseline that shows the compute
  // alone.
  bool moves_memory = true;
};

// Simulated ranks gather as the usual transport of their devices does.
TransportTraits simulated_traits(bool on_gpu);

// The device must outlive the communicator.
std::unique_ptr<Communicator> make_simulated_communicator(Device& device,
                                                          const SimulatedOptions& options);

}  // namespace fsdp
