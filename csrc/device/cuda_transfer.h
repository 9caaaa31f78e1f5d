// Does to a GPU what a network does: a stream is busy for a given time, memory is read and written
// meanwhile, and some multiprocessors, or none, are not available to other work. Without moves it
// is a delay for tests.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "device/stream.h"

namespace fsdp {

// Loads the kernels of the functions below: Note [loaded kernels] in pack/pack_cuda.cu.
void load_transfer_kernels();

// Runs on the current device. It occupies `multiprocessors` (at least one) completely: one block on
// each asks for all of its shared memory. A block's time begins when it starts to run. Each slice
// is moved at its share of the duration, so the traffic is even.
void launch_transfer(cudaStream_t stream, std::chrono::nanoseconds duration,
                     const std::vector<Move>& moves, int multiprocessors);

// Runs on the current device. It uses the driver's copies, which use copy engines where there are
// any, and one thread that waits for the rest of `duration`. Pieces that are only read
// (Move::written_piece) are left out. `start` is eight bytes of device memory that only this stream
// uses; null if there are no moves.
void launch_transfer_by_engines(cudaStream_t stream, std::chrono::nanoseconds duration,
                                const std::vector<Move>& moves, std::uint64_t* start);

}  // namespace fsdp
