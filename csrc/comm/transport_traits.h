// The constant properties of a transport. Each transport's header has its own traits, and the
// schedule never decides by a name.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

// How a transport gathers several parameters best. The layout of a unit follows it:
// Note [gather plans] in core/memory/layout.h.
enum class GatherBy : std::uint8_t {
  Packing,    // all parameters in one message, through a staging buffer
  Size,       // large parameters directly, the small ones packed, in one launch
  Parameter,  // every parameter directly
};

struct TransportTraits {
  const char* name = "";  // "shared_memory", "process_group", "nccl", ...
  GatherBy gather_by = GatherBy::Packing;
  // No data arrives, and only the time is meant to be real.
  bool is_simulated = false;
  // Collectives have run when their calls return, on the thread that calls: Note [inline groups].
  // Nothing overlaps them then.
  bool is_inline = false;
  // Collectives are composed of messages: Note [composed collectives].
  bool is_composed = false;
  // Reductions add up the ranks' numbers in the order of ranks, as if one rank did it alone.
  bool sums_in_rank_order = false;
  // Reductions may have to write the reduce output even if others write the flat gradient: Note
  // [shards and gradients in windows] in core/lanes.h.
  bool keeps_reduce_output = false;
  const char* flight_backend = "gloo";  // as PyTorch's tools call the transport
  // For each rank, the number of its host, in groups whose ranks share memory within a host and
  // send messages between hosts: Note [groups that span hosts]. Otherwise empty.
  std::vector<int> hosts = {};
};

}  // namespace fsdp
