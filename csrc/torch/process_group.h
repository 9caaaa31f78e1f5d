// Transport over any torch.distributed backend of the host (gloo, mpi, ucc, "fake").
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"

namespace fsdp {

// `group` must be this communicator's own: collectives run on a stream's thread, so another user
// of the group would race it for the order of collectives. `groups_one_by_one`: to say that it can
// group, which takes as long as without, so that tests see the direct plan (Note [gather plans]).
std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, bool groups_one_by_one);

}  // namespace fsdp
