// The host's clock for measurements: ticks that cost little to read, and the seconds that they are.
//
// Where the kernel itself keeps time by the processor's counter (clocksource "tsc"), which it does
// only if that runs evenly and alike on all cores, ticks are that counter's, read at less than half
// of what std::chrono::steady_clock costs. Elsewhere they are its nanoseconds.
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

// Of std::chrono::steady_clock; 0 for 0 ticks, which is never.
double seconds(std::int64_t ticks);

}  // namespace fsdp::host_clock
