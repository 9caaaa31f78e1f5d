// A transport over any torch.distributed backend for CPU tensors (gloo, mpi, ucc, "fake").
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/process_identity.h"

namespace fsdp {

// The ranks as messages name them: by their numbers in the whole job.
struct GroupMembers {
  int global_rank = 0;                                     // this rank
  std::vector<std::pair<int, ProcessIdentity>> processes;  // those that are known, of other ranks
};

// What an error of a backend says, without the position in a source file, the stack or the
// traceback that some begin or end with. Empty if nothing is left.
std::string plain_text(std::string message);

// `group` must belong to this communicator alone. Collectives run on a stream's thread, so their
// order relative to other collectives on the group would differ between ranks. With
// `groups_one_by_one` the communicator claims that it can group collectives, so that tests cover
// the direct plan (Note [gather plans]).
std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, GroupMembers members, bool groups_one_by_one);

}  // namespace fsdp
