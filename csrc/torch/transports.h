// The lanes of each transport.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/nccl.h"
#include "core/lanes.h"

namespace fsdp {

// Of the host, over one private process group for each lane.
std::shared_ptr<Lanes> make_process_group_lanes(c10::intrusive_ptr<c10d::ProcessGroup> gather,
                                                c10::intrusive_ptr<c10d::ProcessGroup> reduce,
                                                std::chrono::milliseconds timeout,
                                                bool groups_one_by_one);

// Of GPU `device`, over NCCL with `options`; `timeout` is that of the host's own waits.
std::shared_ptr<Lanes> make_nccl_lanes(const nccl::Api& api, int device, const nccl::UniqueId& id,
                                       const NcclOptions& options,
                                       std::chrono::milliseconds timeout);

// One collective on a lane, between what the compute stream was given before and what it gets
// after: for tests and benchmarks. Shapes as in comm/communicator.h.
void run_all_gather(Lanes& lanes, const at::Tensor& input, at::Tensor& output);
void run_reduce_scatter(Lanes& lanes, const at::Tensor& input, at::Tensor& output);

// torch's streams and allocator (cuda_framework.cpp, or no_cuda/).
CudaFramework cuda_framework();

}  // namespace fsdp
