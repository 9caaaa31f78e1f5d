// The format of PyTorch's Flight Recorder, which its tools read: a dict in Python's pickle format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/record/flight_tape.h"

namespace fsdp {

// `seen` is in order of issue. `forgotten` counts earlier collectives that are no longer kept.
std::string flight_file(const std::vector<SeenFlight>& seen, std::uint64_t forgotten);

}  // namespace fsdp
