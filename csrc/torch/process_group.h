// A transport over torch.distributed backends for CPU tensors that serve any thread: gloo and
// "fake". Others: torch/inline_group.h.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"
#include "comm/liveness/deadlock_watch.h"
#include "comm/messages/composed.h"
#include "torch/failure_board.h"

namespace fsdp {

// With messages, as gloo has, collectives are composed of them.
TransportTraits process_group_traits(bool has_messages);

// State shared by the communicators of both lanes of a group.
struct LaneGroup {
  GroupMembers members;
  std::shared_ptr<const FailureBoard> failures;
  std::shared_ptr<PublishedLanes> published;
  std::shared_ptr<DeadlockThread> deadlocks;  // null: ranks that wait for each other time out
};

// `group` must belong to this communicator alone. Collectives run on a stream's thread, so their
// order relative to other collectives on the group would differ between ranks. With
// `groups_one_by_one` the communicator claims that it can group collectives, so that tests cover
// the direct plan (Note [gather plans]).
//
// `host` has the ranks that share memory with this one: Note [groups that span hosts]. Null: there
// are none, or the backend has no messages.
std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group, LaneGroup lanes, MessageStaging::Use use,
    bool groups_one_by_one, std::unique_ptr<HostRanks> host);

}  // namespace fsdp
