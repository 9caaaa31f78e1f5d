// Makes the lanes of each transport, and runs single collectives on them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl.h"
#include "comm/shared_memory/shared_memory.h"
#include "comm/simulated.h"
#include "core/lanes.h"
#include "device/stream.h"
#include "torch/inline_group.h"
#include "torch/process_group.h"

namespace fsdp {

// The usual traits of the transport of this name, for plans. A process group counts as gloo.
TransportTraits usual_traits(const std::string& name, bool on_gpu);

// On the host, over one private process group for each lane, both of the same ranks. `on_host` has
// the ranks that share memory with this one, or nothing. Ranks that fail write into `store`, which
// must have no entries of earlier lanes, and may be null.
std::shared_ptr<Lanes> make_process_group_lanes(c10::intrusive_ptr<c10d::ProcessGroup> gather,
                                                c10::intrusive_ptr<c10d::ProcessGroup> reduce,
                                                const GroupMembers& members,
                                                c10::intrusive_ptr<c10d::Store> store,
                                                std::chrono::milliseconds timeout,
                                                bool groups_one_by_one, HostLanes on_host);

// On the host, on the calling thread, over a process group that no other thread may use: Note
// [inline groups]. `timeout` limits the host's own waits.
std::shared_ptr<Lanes> make_inline_lanes(const pybind11::object& collectives,
                                         const InlineRank& place,
                                         std::chrono::milliseconds timeout);

// On the host, over memory that the ranks share; see comm/shared_memory/shared_memory.h. `timeout`
// limits waits for peers, and `host_timeout` the host's own waits.
std::shared_ptr<Lanes> make_shared_memory_lanes(const SharedMemoryEndpoint& endpoint,
                                                const std::vector<std::string>& addresses, int rank,
                                                std::chrono::milliseconds timeout,
                                                std::chrono::milliseconds host_timeout);

// Returns a uint8 tensor in memory that the collectives of a lane ("gather" or "reduce") read or
// write best. All ranks ask for the same size. The lanes must outlive the tensor.
at::Tensor lane_buffer(Lanes& lanes, std::int64_t bytes, const std::string& lane, BufferUse use);

// Returns a uint8 tensor of zeros that other ranks of the host can read.
at::Tensor shared_zeros(std::int64_t bytes);

// Without peers (comm/simulated.h), on GPU `device`, or on the host if `device` is negative. On a
// GPU, packing occupies at most `pack_multiprocessors` multiprocessors; 0 stands for all.
std::shared_ptr<Lanes> make_simulated_lanes(int device, const SimulatedOptions& options,
                                            int pack_multiprocessors,
                                            std::chrono::milliseconds timeout);

// On GPU `device`, over NCCL communicators with `options`. Through `store`, which is theirs alone
// and may be null, ranks tell each other what they wait for. Packing occupies at most
// `pack_multiprocessors` multiprocessors; 0 stands for all. `timeout` limits the host's own waits.
std::shared_ptr<Lanes> make_nccl_lanes(const nccl::Api& api, int device, const nccl::UniqueId& id,
                                       NcclOptions options, c10::intrusive_ptr<c10d::Store> store,
                                       const GroupMembers& members, int pack_multiprocessors,
                                       std::chrono::milliseconds timeout);

// One collective, after the compute stream's earlier work and before its later work. Shapes are as
// in comm/communicator.h. The schedule does not use these.
void run_all_gather(Lanes& lanes, const at::Tensor& input, at::Tensor& output);
void run_reduce_scatter(Lanes& lanes, const at::Tensor& input, at::Tensor& output);
void run_all_reduce(Lanes& lanes, at::Tensor& data);

// PyTorch's current stream and its caching allocator, for device/cuda_stream.cpp. Empty in a build
// without CUDA (no_cuda_framework.cpp).
CudaFramework cuda_framework();

// Blocks until all ranks have sent a message of the same length, and returns the messages, one
// after another. For set-up.
std::string exchange_messages(Lanes& lanes, const std::string& mine);

}  // namespace fsdp
