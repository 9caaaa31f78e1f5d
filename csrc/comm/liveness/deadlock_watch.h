// Finds ranks that wait for each other in different lanes if the ranks share no memory.
//
// Note [ranks that share no memory]
// Ranks that share no memory write the facts for Note [lanes that wait for each other] on a board.
// A rank writes only if it is stuck in a lane, and has been so for two looks. Each lane has one
// entry, for the last rank that got stuck there, so reading costs the same for any number of ranks.
//
// A rank compares the other lane's entry with its own state. An old entry is still true if it
// matches: its writer can only go on after this rank has begun the collective that the writer waits
// for, and this rank has not begun it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/liveness/lane_state.h"

namespace fsdp {

// A board on which each rank can write a text that all ranks can read. Access may be slow, and may
// throw.
class Board {
 public:
  virtual ~Board() = default;

  virtual void write(const std::string& key, const std::string& text) = 0;
  virtual std::string read(const std::string& key) = 0;  // empty if nothing was written
};

// The state of this rank's two lanes. Their communicators write the label of the current
// collective, and increment a counter for each collective that they issue.
class PublishedLanes {
 public:
  Mailbox& lane(int number) { return lanes_[number]; }

  RankState state() const { return rank_state_in({&lanes_[0], &lanes_[1]}); }
  std::string label(int lane) const { return lanes_[lane].activity.label(); }

 private:
  Mailbox lanes_[2];
};

// One rank's side.
class DeadlockWatch {
 public:
  DeadlockWatch(std::unique_ptr<Board> board, std::shared_ptr<const PublishedLanes> lanes,
                int global_rank)
      : board_(std::move(board)), lanes_(std::move(lanes)), global_rank_(global_rank) {}

  // Returns the reason if the lanes are in a deadlock, else "". Call it at intervals. If `lanes`
  // and `board` are null, it returns "", and tell() does nothing.
  std::string look();
  // Tells ranks that are stuck that this rank has given up.
  void tell(const std::string& reason);

 private:
  void write_stuck(int lane, const RankState& state);
  std::string compare(int lane, const RankState& state);

  std::unique_ptr<Board> board_;
  std::shared_ptr<const PublishedLanes> lanes_;
  int global_rank_;
  RankState last_;     // in the last look
  RankState written_;  // what stands on the board
  bool has_written_ = false;
};

// A thread that looks at intervals, from start until it has something to report, or until stop. It
// also reports that one lane has failed, because collectives of the other lane may wait for ranks
// that have given up.
class DeadlockThread {
 public:
  DeadlockThread(std::unique_ptr<Board> board, std::shared_ptr<const PublishedLanes> lanes,
                 int global_rank, std::chrono::milliseconds interval);
  ~DeadlockThread() { stop(); }

  DeadlockThread(const DeadlockThread&) = delete;
  DeadlockThread& operator=(const DeadlockThread&) = delete;

  // Starts the thread. `report` has to end both lanes. Its argument is the reason: the result of
  // look(), or the argument of fail().
  void start(std::function<void(const std::string&)> report);
  // Tells the thread that one lane has failed. Any thread may call this. With `tells_others`, the
  // thread ends this rank's lanes, and then writes the reason on the board for the other ranks.
  void fail(const std::string& reason, bool tells_others = false);
  // Nothing is reported any more. The board may hang, and then the thread outlives this object.
  void stop();

 private:
  struct Shared {
    explicit Shared(DeadlockWatch a_watch) : watch(std::move(a_watch)) {}

    std::string look();
    std::string reason_for_others();

    DeadlockWatch watch;
    std::mutex mutex;
    std::condition_variable stopped;
    bool is_looking = false;
    std::function<void(const std::string&)> report;  // empty when stopped
    // Why a lane has failed. It needs its own mutex, because report() may call fail().
    std::mutex failure_mutex;
    std::string failure;
    bool tells_others = false;
  };

  static void run(const std::shared_ptr<Shared>& shared, std::chrono::milliseconds interval);

  std::shared_ptr<Shared> shared_;
  std::chrono::milliseconds interval_;
  std::thread thread_;
};

}  // namespace fsdp
