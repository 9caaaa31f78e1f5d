// A transport over any torch.distributed backend for CPU tensors (gloo, mpi, ucc, "fake").
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
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

// How ranks tell each other what they were doing when a collective failed. Both lanes of a group
// have the same one. The process that serves the store may hang, too, so an exchange gives up after
// a moment.
class FailureBoard {
 public:
  // `store` is that of one of the lanes' groups; it may be null. Messages call this rank
  // `global_rank`.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int global_rank)
      : store_(std::move(store)), rank_(rank), size_(size), global_rank_(global_rank) {}

  // Tells the other ranks that this rank was in `what` when it failed, and returns what they were
  // in, in a sentence. Waits a moment for ranks that fail a little later. Empty if no other rank
  // says anything.
  std::string exchange(const std::string& what) const;

 private:
  std::string ask(const std::string& what) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  int global_rank_;
};

// What an error of a backend says, without the position in a source file, the stack or the
// traceback that some begin or end with. Empty if nothing is left.
std::string plain_text(std::string message);

// `group` must belong to this communicator alone. Collectives run on a stream's thread, so their
// order relative to other collectives on the group would differ between ranks. With
// `groups_one_by_one` the communicator claims that it can group collectives, so that tests cover
// the direct plan (Note [gather plans]).
//
// Note [exchange group]
// What ranks say about themselves travels on `exchange_group`, in a first block that has the same
// size whatever it is. gloo ends the process if a message is larger than the one it expects, and
// ranks that differ would send the one where another is expected. Null: on `group`.
std::unique_ptr<Communicator> make_process_group_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    c10::intrusive_ptr<c10d::ProcessGroup> exchange_group, GroupMembers members,
    std::shared_ptr<const FailureBoard> board, bool groups_one_by_one);

}  // namespace fsdp
