#pragma once

#include <vector>

namespace fsdp {

struct PipelineOptions {
  int prefetch_depth = 1;           // bucket gathers in flight ahead of the unit in use
  int nesting = 1;                  // how many units below the root enclose each other, at most
  bool has_peers = true;            // ranks that are not simulated
  bool check_order = true;          // compare the first iteration's collectives across ranks
  bool keeps_gather_inputs = true;  // Note [gather inputs] in core/gather/gatherer.h
  std::vector<int> mesh_ranks;      // as in RankExchange
  bool is_last_backward = true;     // the end of backward waits for all reductions
};

}  // namespace fsdp
