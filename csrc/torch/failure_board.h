// How ranks of a process group report failed collectives to each other, through its store.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "comm/liveness/deadlock_watch.h"
#include "comm/liveness/process_identity.h"

namespace fsdp {

// The ranks as messages name them: by their numbers in the whole job.
struct GroupMembers {
  int global_rank = 0;                                     // this rank
  std::vector<int> global_ranks;                           // all ranks of the group, in order
  std::vector<std::pair<int, ProcessIdentity>> processes;  // those that are known, in order

  std::string name_of(int rank) const;                  // such as "rank 3 (process 81 on node2)"
  std::vector<int> neighbours(std::size_t most) const;  // at most so many, in order
};

// How ranks tell each other what they were doing when a collective failed. Both lanes of a group
// share one board. The process that serves the store may hang, too, so an exchange gives up after a
// moment. Messages name the ranks that do not answer, since nothing else may say which one a
// backend has waited for.
class FailureBoard {
 public:
  // `board` is in the store of one of the lanes' groups; it may be null.
  explicit FailureBoard(std::shared_ptr<Board> board) : board_(std::move(board)) {}

  // Tells the other ranks that this rank failed in `what`. Returns sentences that name the other
  // ranks' collectives and the ranks that did not answer. Waits a moment for ranks that fail a
  // little later.
  std::string exchange(const std::string& what, const GroupMembers& members) const;

  // Only tells them.
  void tell(const std::string& what, const GroupMembers& members) const;

 private:
  std::string ask(const std::string& what, const GroupMembers& members) const;
  std::string read_until(const std::string& key, std::chrono::steady_clock::time_point end) const;

  std::shared_ptr<Board> board_;
};

// A board for the ranks that have the same store: Note [ranks that share no memory]. Null if
// `store` is null.
std::unique_ptr<Board> make_store_board(c10::intrusive_ptr<c10d::Store> store);

}  // namespace fsdp
