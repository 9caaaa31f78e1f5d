// The lanes of each transport.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/nccl.h"
#include "comm/shared_memory.h"
#include "comm/simulated.h"
#include "core/lanes.h"

namespace fsdp {

// Of the host, over one private process group for each lane.
std::shared_ptr<Lanes> make_process_group_lanes(c10::intrusive_ptr<c10d::ProcessGroup> gather,
                                                c10::intrusive_ptr<c10d::ProcessGroup> reduce,
                                                std::chrono::milliseconds timeout,
                                                bool groups_one_by_one);

// Of the host, over memory that the ranks share; see comm/shared_memory.h. `timeout` is that of
// waits for peers, `host_timeout` that of the host's own.
std::shared_ptr<Lanes> make_shared_memory_lanes(const SharedMemoryEndpoint& endpoint,
                                                const std::vector<std::string>& addresses, int rank,
                                                std::chrono::milliseconds timeout,
                                                std::chrono::milliseconds host_timeout);

// `bytes` bytes, uint8, as inputs of the lanes' collectives have them. For tests and benchmarks;
// all ranks ask for as many, and the tensor goes before the lanes do.
at::Tensor input_buffer(Lanes& lanes, std::int64_t bytes);

// `bytes` zeros, uint8, where other ranks of the host can read them.
at::Tensor shared_zeros(std::int64_t bytes);

// No peers: see comm/simulated.h. Of GPU `device`, or of the host if that is negative.
std::shared_ptr<Lanes> make_simulated_lanes(int device, const SimulatedOptions& options,
                                            std::chrono::milliseconds timeout);

// Of GPU `device`, over NCCL with `options`; `timeout` is that of the host's own waits.
std::shared_ptr<Lanes> make_nccl_lanes(const nccl::Api& api, int device, const nccl::UniqueId& id,
                                       const NcclOptions& options,
                                       std::chrono::milliseconds timeout);

// One collective on a lane, between what the compute stream was given before and what it gets
// after: for tests and benchmarks. Shapes as in comm/communicator.h.
void run_all_gather(Lanes& lanes, const at::Tensor& input, at::Tensor& output);
void run_reduce_scatter(Lanes& lanes, const at::Tensor& input, at::Tensor& output);
void run_all_reduce(Lanes& lanes, at::Tensor& data);
void run_broadcast(Lanes& lanes, at::Tensor& data, int root);
void run_barrier(Lanes& lanes);

// torch's streams and allocator (cuda_framework.cpp, or no_cuda_framework.cpp).
CudaFramework cuda_framework();

}  // namespace fsdp
