// The host's clock: ticks keep their order and convert to seconds of the steady clock.
#include "device/host_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace fsdp::test {
namespace {

double steady() { return static_cast<double>(host_clock::steady_nanoseconds()) * 1e-9; }

TEST(HostClock, TicksLieBetweenReadingsOfTheSteadyClock) {
  for (int i = 0; i < 100; ++i) {
    const double before = steady();
    const std::int64_t ticks = host_clock::now();
    const double after = steady();
    const double seconds = host_clock::seconds(ticks);
    EXPECT_GE(seconds, before - 5e-6);
    EXPECT_LE(seconds, after + 5e-6);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

TEST(HostClock, ConversionKeepsTheOrder) {
  std::vector<std::int64_t> ticks;
  for (int i = 0; i < 10000; ++i) {
    ticks.push_back(host_clock::now());
  }
  double last = 0.0;
  for (const std::int64_t each : ticks) {
    const double seconds = host_clock::seconds(each);
    EXPECT_GE(seconds, last);
    last = seconds;
  }
}

TEST(HostClock, CoresAgree) {
  for (int i = 0; i < 20; ++i) {
    const std::int64_t before = host_clock::now();
    std::int64_t there = 0;
    std::thread([&there] { there = host_clock::now(); }).join();
    const std::int64_t after = host_clock::now();
    EXPECT_LE(before, there);
    EXPECT_LE(there, after);
  }
}

TEST(HostClock, ZeroTicksAreZeroSeconds) { EXPECT_EQ(host_clock::seconds(0), 0.0); }

}  // namespace
}  // namespace fsdp::test
