// How ranks that share memory come together for a collective, and find out who does not.
//
// Note [meetings]
// A collective is a meeting, or two: each rank says in its mailbox where its input is and posts the
// meeting's number; each waits for the others' posts and reads what it needs straight from where
// they have it; each says that it has finished, and leaves when all have. So inputs may change as
// soon as a collective is over, as with any transport. Each rank writes its own memory only.
// Numbers wrap around: no rank posts a meeting before all have posted the one before.
//
// Note [who is missing]
// A wait spins for a moment, giving its core to whoever wants it, then sleeps on the word that it
// waits for. Now and then it looks whether the rank's process still exists. A rank that ends,
// fails, or gives up makes everybody's collective fail: what was read of a rank that has failed may
// be wrong, so that the last look of each collective is whether any has.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/futex.h"
#include "comm/shared_arena.h"
#include "base/dtype.h"

namespace fsdp {

// What a rank says of the collective that it takes part in.
struct Operation {
  enum class Kind : std::uint32_t { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier };

  bool agrees_with(const Operation& other) const;  // but for the offset
  std::string describe() const;

  Kind kind = Kind::Barrier;
  DType dtype = DType::Bytes;
  std::int32_t root = 0;
  std::uint64_t bytes = 0;    // of the rank's input
  std::uint64_t pattern = 0;  // of how its parts lie
  std::uint64_t offset = 0;   // of the input, in the rank's arena
};

// One rank's side of one communicator, in its arena. It alone writes.
struct Mailbox {
  enum class Standing : std::uint32_t { Member, Failed, Left };

  alignas(64) futex::Word posted{0};    // the newest meeting it has come to
  alignas(64) futex::Word finished{0};  // the newest in which it has read all it needs
  alignas(64) std::atomic<Standing> standing{Standing::Member};
  char reason[1024] = {};   // why it failed; written before `standing`
  Operation operations[2];  // of the newest post and the one before
};

struct Peer {
  ArenaAddress arena;
  std::shared_ptr<const ArenaView> view;
  const Mailbox* mailbox = nullptr;
  int name = 0;  // in messages: its number among all ranks of the job
};

// The meetings of one communicator as one rank sees them. One thread goes to them; any may abort.
class Meetings {
 public:
  // `peers` in order of rank, this one included. Any wait takes `timeout` at most. `newest`: the
  // number in all mailboxes; for tests.
  Meetings(Mailbox& mine, std::vector<Peer> peers, int rank, std::chrono::milliseconds timeout,
           std::uint32_t newest = 0);
  ~Meetings();

  Meetings(const Meetings&) = delete;
  Meetings& operator=(const Meetings&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // What the next meetings are for, in messages; `what` outlives them. Throws if aborted.
  void begin(const std::string& what);

  // Comes to the next meeting. The input may be read by others from now on.
  void arrive(const Operation& operation);
  // Waits for rank `from`, which has to be there for the same, and returns where its input is.
  const char* await(int from, const Operation& operation);
  // Says that all is read, and waits until everybody says so. The input may change afterwards.
  void leave();

  // Makes this rank's meetings fail, and all others' with it.
  void abort(const std::string& reason);
  // Why this rank's or, as far as is known, another's have failed; empty if they have not.
  std::string async_error();

 private:
  bool has_come(const futex::Word& word) const;
  void wait_for(const Peer& peer, const futex::Word& word);
  void sleep_until_come(const Peer& peer, const futex::Word& word);
  [[noreturn]] void give_up(const Peer& peer) const;
  void check_standing(const Peer& peer) const;
  std::string own() const;
  void wake_all();

  Mailbox& mine_;
  std::vector<Peer> peers_;
  int rank_;
  std::chrono::milliseconds timeout_;
  std::uint32_t number_;
  const std::string* what_ = nullptr;

  std::mutex mutex_;  // of error_
  std::atomic<bool> aborted_{false};
  std::string error_;
};

}  // namespace fsdp
