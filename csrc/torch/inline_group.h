// A transport over process groups that only the calling thread may use.
//
// Note [inline groups]
// A process group that is written in Python, or whose backend serves one thread only (MPI), cannot
// be called from the threads of lanes. So its lanes have no threads. Their streams run work at
// once, on the thread that issues it and in the order of issue (InlineStream in
// device/host_stream.h), and nothing overlaps. Collectives of both lanes travel on the user's own
// group, as those of FSDP2 do, since their order is that of the program.
//
// With lanes that have threads, ranks may differ in the order of gathers relative to reductions:
// a rank that leaves a parameter unused reduces later. Here such ranks would be in different
// collectives of one group, and few backends notice. So ranks tell each other in a small all-gather
// which collective comes next, and raise if they differ.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace fsdp {

// The numbers of a rank in an inline group.
struct InlineRank {
  int rank;
  int size;
  int global_rank;
};

// `collectives` are Python's (fsdp_ext/comm/inline_group.py). Streams that this communicator is
// given run work on the calling thread.
std::unique_ptr<Communicator> make_inline_communicator(pybind11::object collectives,
                                                       const InlineRank& place);

}  // namespace fsdp
