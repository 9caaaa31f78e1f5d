// How a transport gathers several parameters best. The layout of a unit follows it:
// Note [gather plans] in core/layout.h.
#pragma once

#include <cstdint>

namespace fsdp {

enum class GatherBy : std::uint8_t {
  Packing,    // all parameters in one message, through a staging buffer
  Size,       // large parameters directly, the small ones packed, in one launch
  Parameter,  // every parameter directly
};

}  // namespace fsdp
