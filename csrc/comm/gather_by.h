// How a transport gathers a unit's parameters: Note [gather plans] in core/layout.h.
#pragma once

#include <cstdint>

namespace fsdp {

enum class GatherBy : std::uint8_t { Packing, Size, Parameter };

}  // namespace fsdp
