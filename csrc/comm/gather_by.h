// How a transport gathers several parameters best. The layout of a unit follows it:
// Note [gather plans] in core/memory/layout.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

enum class GatherBy : std::uint8_t {
  Packing,    // all parameters in one message, through a staging buffer
  Size,       // large parameters directly, the small ones packed, in one launch
  Parameter,  // every parameter directly
};

// How the transport of this name gathers. A simulated one gathers as the usual transport of its
// devices does.
inline GatherBy gather_by_of(std::string_view transport, bool on_gpu) {
  const bool is_simulated = transport == "simulated";
  if (transport == "nccl" || (is_simulated && on_gpu)) {
    return GatherBy::Size;
  }
  return transport == "shared_memory" || is_simulated ? GatherBy::Parameter : GatherBy::Packing;
}

}  // namespace fsdp
