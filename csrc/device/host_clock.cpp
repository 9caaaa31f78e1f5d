#include "device/host_clock.h"

#include <chrono>
#include <fstream>
#include <limits>
#include <mutex>
#include <string>

namespace fsdp::host_clock {
namespace {

bool kernel_counts_cycles() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string source;
  return static_cast<bool>(file >> source) && source == "tsc";
#else
  return false;
#endif
}

// One point in time, by both clocks.
struct Pair {
  std::int64_t ticks;
  std::int64_t nanoseconds;
};

// An interruption between the two readings makes them differ, so the closest pair of several
// counts.
Pair read_both() {
  constexpr int kTries = 8;
  Pair best{};
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < kTries; ++i) {
    const std::int64_t before = now();
    const std::int64_t nanoseconds = steady_nanoseconds();
    const std::int64_t between = now() - before;
    if (between < least) {
      least = between;
      best = {before + between / 2, nanoseconds};
    }
  }
  return best;
}

}  // namespace

const bool counts_cycles = kernel_counts_cycles();

namespace {

const Pair at_start = read_both();

}  // namespace

std::int64_t steady_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double seconds(std::int64_t ticks) {
  if (ticks == 0 || !counts_cycles) {
    return static_cast<double>(ticks) * 1e-9;
  }
  // Interpolates between the pair at the start of the process and the newest pair. A new pair is
  // read only for ticks after the newest one. All ticks in between use the same pair, so their
  // order is preserved.
  static std::mutex mutex;
  static Pair newest = at_start;
  const std::lock_guard<std::mutex> lock(mutex);
  if (ticks >= newest.ticks) {
    newest = read_both();
  }
  const Pair last = newest;
  const double nanoseconds_a_tick = static_cast<double>(last.nanoseconds - at_start.nanoseconds) /
                                    static_cast<double>(last.ticks - at_start.ticks);
  const double before = static_cast<double>(last.ticks - ticks) * nanoseconds_a_tick;
  return (static_cast<double>(last.nanoseconds) - before) * 1e-9;
}

}  // namespace fsdp::host_clock
