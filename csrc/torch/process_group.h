// A transport over any torch.distributed backend for CPU tensors (gloo, mpi, ucc, "fake").
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"

namespace fsdp {

// `group` must belong to this communicator alone. Collectives run on a stream's thread, so their
// order relative to other collectives on the group would differ between ranks. With
// `groups_one_by_one` the communicator claims that it can group collectives, so that tests cover
// the direct plan (Note [gather plans]).
std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, bool groups_one_by_one);

}  // namespace fsdp
