// The host's clock for measurements: ticks are nanoseconds of std::chrono::steady_clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace fsdp::host_clock {

inline std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Converts ticks to seconds of std::chrono::steady_clock. 0 ticks stand for "never" and become 0.
inline double seconds(std::int64_t ticks) { return static_cast<double>(ticks) * 1e-9; }

}  // namespace fsdp::host_clock
