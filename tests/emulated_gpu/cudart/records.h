// What an event stands for: a place in the work of a stream.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "races.h"
#include "shared_file.h"

namespace emulated_gpu {

using WallClock = std::chrono::steady_clock;

// One record. Later records of the event do not change it, and streams that wait for it hold it.
class Record {
 public:
  explicit Record(Clock reached_after) : clock(std::move(reached_after)) {}
  virtual ~Record() = default;

  const Clock clock;  // what has ended when it is reached

  virtual void reach();
  virtual bool is_reached();
  virtual void wait();
  WallClock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  WallClock::time_point time_;
};

// The memory that an event of several processes consists of.
class SharedRecords {
 public:
  // A new one, or one that exists. Its page is null if there is no memory, or if that has gone.
  SharedRecords();
  explicit SharedRecords(const SharedRange& range);
  ~SharedRecords();
  SharedRecords(const SharedRecords&) = delete;
  SharedRecords& operator=(const SharedRecords&) = delete;

  struct Page {
    std::atomic<std::uint64_t> last;     // the number of the newest record, or 0
    std::atomic<std::uint64_t> reached;  // all records until this number
  };

  const SharedRange range;
  Page* const page;
};

// A record of this process that others see.
class SharedRecord final : public Record {
 public:
  SharedRecord(std::shared_ptr<SharedRecords> all, std::uint64_t number, Clock clock);

  // Makes a record that comes after all others.
  static std::shared_ptr<SharedRecord> next(std::shared_ptr<SharedRecords> all, Clock clock);
  // Returns the newest record of all processes, or null if there is none. If this process made it,
  // that is `own`.
  static std::shared_ptr<Record> newest(const std::shared_ptr<SharedRecords>& all,
                                        const std::shared_ptr<Record>& own);

  void reach() override;

 private:
  const std::shared_ptr<SharedRecords> all_;
  const std::uint64_t number_;
};

}  // namespace emulated_gpu
