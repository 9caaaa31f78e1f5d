// The variables that change the emulated GPU. README.md describes them.
#pragma once

#include <cstddef>
#include <string>

namespace emulated_gpu {

struct Settings {
  int devices;
  int multiprocessors;
  std::size_t memory_bytes;  // of each device, in each process
  int most_delay_us;         // each piece of work starts up to this much later, at random
  int seed;                  // of these delays
  bool traces;
  bool finds_races;        // work that uses the same memory without an order is an error
  std::string waits_list;  // the next two: wait_sites.h
  std::string dropped_waits;
};

const Settings& settings();

}  // namespace emulated_gpu
