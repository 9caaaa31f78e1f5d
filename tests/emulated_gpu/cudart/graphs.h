// Graphs, which captures become. graphs.cpp replays them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "emulated_gpu.h"
#include "races.h"

namespace emulated_gpu {

struct Event;

struct Node {
  std::shared_ptr<const Origin> origin;
  std::string what;
  cudaGraphNodeType type;
  Work work;
  std::shared_ptr<Event> external;  // that each launch records or waits for, in place of work
  std::set<std::size_t> after;      // the numbers of the nodes that come before it
  std::size_t number;
};

// It is destroyed by cudaGraphDestroy.
cudaGraph_t new_graph(std::vector<Node> nodes);

}  // namespace emulated_gpu
