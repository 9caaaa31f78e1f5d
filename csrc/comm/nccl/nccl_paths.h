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
// From NCCL 2.24 on, rings gather straight from and to registered buffers over the network. The
// kernel that receives then tells the thread that serves the network so with a flag, once. Until
// 2.32.6, that thread may erase it: it resets the flag's place for each earlier receive that it
// sees to have ended, and small gathers end on the GPU before it sees that. Then it waits for the
// flag for ever (NCCL #2389). Small and large gathers alternate on a lane, so lanes between nodes
// register nothing before 2.32.6. Reductions share the rule, since they lose little by it: between
// nodes, a ring reduces no differently with registered buffers.
//
// Note [symmetric kernels]
// NCCL's symmetric kernels may start before the stream's work before them has ended ("programmatic
// stream serialization"). From 2.28.0 until 2.30.7 they do not wait for it, so a reduce-scatter
// could read its input before pack has written it. Before 2.30.7 buffers are therefore no windows,
// with one exception. From 2.29.0 on, two variables of NCCL's let the kernels for small messages
// (LL) run without windows, too, so both are refused until 2.30.7.
//
// Note [copy engines]
// With the policy "zero", copies and waits of the stream gather, which keep its order, and no
// kernel runs. docs/design/cuda.md says which buffers NCCL needs in windows for that. Before 2.30.7
// only the gather lane has such windows. Its collectives never become symmetric kernels, because
// sums are on the other lane.
// From 2.29.0 until 2.31.2, the first gather by copy engines may hang on two ranks: it is told to
// use the switch for its signals, which is set up in that call, without a barrier (NCCL #2241). On
// compute capability 10.0, it gathers more than 8 MiB from window to window so, whatever the
// policy. So the gather lane of two ranks has no windows there.
//
// Note [groups in registered buffers]
// With the policy "efficiency", all collectives of a group use a ring if the sum of their sizes
// passes the end of a registered buffer (docs/design/cuda.md). So groups end where it would pass
// the end of a member's buffer, whichever member NCCL looks at.
//
// Note [private memory]
// Only its own GPU can access private memory, which otherwise is like memory from ncclMemAlloc.
// docs/design/cuda.md says why it is enough for buffers that are not windows. Shards
// and gradients are never private: when a user copies into them from another GPU, PyTorch lets that
// GPU write.
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
