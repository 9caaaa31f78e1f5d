// Which of NCCL's algorithms a lane can use, and what its buffers and launches need for them.
//
// Note [paths of lanes]
// NCCL chooses an algorithm by a communicator's settings and by what it knows of the buffers.
// docs/design/cuda.md has a table of what each version does, with NCCL's sources.
//
// - Registered buffers (ncclCommRegister) let rings read and write them in place, and let the
//   policy "efficiency" use the switch (NVLS) with 4 to 6 thread blocks.
// - Symmetric windows (ncclCommWindowRegister) let symmetric kernels and copy engines run. Windows
//   without NCCL_WIN_COLL_SYMMETRIC do nothing for collectives that a registered buffer does not,
//   and map the buffer on every peer, so they are not used.
//
// Note [registration between nodes]
// Lanes between nodes register nothing before NCCL 2.32.6, because gathers into registered buffers
// may wait for ever there: "Several nodes" in docs/design/cuda.md. Reductions share the rule, since
// they lose little by it.
//
// Note [symmetric kernels]
// Before NCCL 2.30.7, symmetric kernels do not wait for the stream's earlier work, so a
// reduce-scatter could read its input before pack has written it. Buffers are therefore no windows
// there, except as Note [copy engines] says, and variables that let such kernels run without
// windows are refused: "Symmetric kernels" in docs/design/cuda.md.
//
// Note [copy engines]
// With the policy "zero", copies and waits of the stream gather, which keep its order, and no
// kernel runs. Before 2.30.7 only the gather lane has windows for it. Its collectives never become
// symmetric kernels, because sums are on the other lane. From 2.29.0 until 2.31.2, the first gather
// by copy engines may hang on two ranks. Even without the policy, NCCL copies some gathers in
// windows, so the gather lane of two ranks has no windows there: "Copy engines" in
// docs/design/cuda.md.
//
// Note [groups in registered buffers]
// With the policy "efficiency", a group is cut before its total size could pass the end of any
// member's buffer: "Groups" in docs/design/cuda.md.
//
// Note [private memory]
// Private memory is like memory from ncclMemAlloc, but only its own GPU can access it. It suffices
// for buffers that are not windows: docs/design/cuda.md. Shards and gradients are never private,
// because a user may copy into them from another GPU, and PyTorch lets that GPU write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl.h"
#include "comm/nccl/nccl_api.h"

namespace fsdp {

enum class LaneUse : std::uint8_t { Gathers, Reductions };

struct LanePath {
  nccl::LaneSettings settings;  // without kAutoPolicy
  bool registers = false;       // buffers: Note [registration between nodes]
  bool symmetric_inputs = false;
  bool symmetric_outputs = false;

  // Note [groups in registered buffers]
  bool cuts_groups() const {
    return registers && settings.cta_policy == nccl::kEfficiencyPolicy && !symmetric_outputs;
  }
  // Whether such buffers are symmetric windows. Others are registered, if anything is.
  bool is_symmetric(BufferUse use) const {
    const bool is_input = use == BufferUse::Input || use == BufferUse::Shard;
    return is_input ? symmetric_inputs : symmetric_outputs;
  }
  // Whether NCCL reduces faster into registered memory. Its ring does not, because it receives into
  // NCCL's own buffers.
  bool registers_gradients() const {
    return symmetric_outputs || settings.cta_policy == nccl::kEfficiencyPolicy;
  }
  // See Note [private memory].
  bool is_private(BufferUse use) const {
    const bool is_of_users = use == BufferUse::Shard || use == BufferUse::Gradient;
    return !is_of_users && !is_symmetric(use);
  }
};

// Throws Error if a setting or NCCL's variables are not safe in this version.
LanePath path_of_lane(const nccl::Api& api, LaneUse use, const NcclOptions& options);

// The number of parts in each group of a gather of `ranks` ranks. `bytes_left` returns the number
// of registered bytes from an address on; 0 if it is not registered.
std::vector<std::size_t> groups_in_buffers(
    const std::vector<GatherPart>& parts, int ranks,
    const std::function<std::size_t(const void*)>& bytes_left);

}  // namespace fsdp
