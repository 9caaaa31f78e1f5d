// The host's clock for measurements: ticks that are cheap to read, and their conversion to seconds.
//
// If the kernel keeps time by the processor's cycle counter (clocksource "tsc"), ticks are cycles.
// Reading them costs less than half of reading std::chrono::steady_clock. The kernel uses that
// counter only if it runs at a constant rate and equally on all cores. Otherwise, ticks are
// nanoseconds of std::chrono::steady_clock.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace fsdp::host_clock {

extern const bool counts_cycles;
std::int64_t steady_nanoseconds();

inline std::int64_t now() {
#if defined(__x86_64__)
  if (counts_cycles) {
    return static_cast<std::int64_t>(__rdtsc());
  }
#endif
  return steady_nanoseconds();
}

// Converts ticks to seconds of std::chrono::steady_clock. 0 ticks stand for "never" and become 0.
double seconds(std::int64_t ticks);

}  // namespace fsdp::host_clock
