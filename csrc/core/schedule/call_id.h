// The number of one call of a unit's forward. It is never used again.
#pragma once

#include <cstdint>

namespace fsdp {

using CallId = std::int64_t;
constexpr CallId kNoCall = -1;

}  // namespace fsdp
