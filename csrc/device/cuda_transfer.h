// What a network does to a GPU, without one: a stream is busy for a while, memory is read and
// written meanwhile, and some multiprocessors, or none, are taken from the rest. With nothing to
// move it is a delay for tests.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "device/stream.h"

namespace fsdp {

// Both on the current device. `multiprocessors` (at least one) are taken whole: a block on each
// asks for all of its shared memory, and its time begins when it has one. Its pace is even: each
// part is moved when its time has come.
void launch_transfer(cudaStream_t stream, std::chrono::nanoseconds duration,
                     const std::vector<Move>& moves, int multiprocessors);

// Copies as the driver likes best, which are copy engines where it has them, and one thread that
// waits for the rest of `duration`. Reads that write nothing (Move::kept) are left out. `start`:
// eight bytes of the device's memory for this stream alone.
void launch_transfer_by_engines(cudaStream_t stream, std::chrono::nanoseconds duration,
                                const std::vector<Move>& moves, std::uint64_t* start);

}  // namespace fsdp
