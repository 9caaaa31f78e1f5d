// Writes what this rank's lanes have sent last, in the format of PyTorch's Flight Recorder:
// Note [flight records] in core/record/flight_tape.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "core/record/flight_tape.h"

namespace fsdp {

struct Lanes;

// Thrown if ranks run different units, or in different orders. Their flight records show where.
class RanksDiffer : public Error {
 public:
  using Error::Error;
};

// Knows the flight tapes of one rank. All its functions are thread-safe.
class FlightRecorder : public std::enable_shared_from_this<FlightRecorder> {
 public:
  // Each pair of lanes keeps its newest `entries` collectives. The path of a record is `prefix` and
  // the rank's number. Errors and watchdogs wait at most `longest_write` until a record is written,
  // so a file system that hangs does not hold them up.
  FlightRecorder(int rank, std::size_t entries, std::string prefix,
                 std::chrono::milliseconds longest_write = std::chrono::seconds(10));

  // Records the collectives of `lanes` from now on. Their communicators have flight groups.
  void record(Lanes& lanes);

  const std::string& path() const { return path_; }
  // Writes the newest collectives of all lanes that still exist to a file, which is never seen half
  // written. Leaves out lanes that a blocked call to the device holds, and returns whether it did.
  // Throws if nothing can be written.
  bool write(const std::string& path) const;
  // Writes them to path(), and says so in a sentence. If that is not possible, the sentence says
  // why. After account_before_abort it only repeats that account.
  std::string account() const noexcept;
  // The same, for watchdogs, which end collectives afterwards. Aborted collectives look complete,
  // so only the first call since lanes were recorded writes the file.
  std::string account_before_abort();

  // Turns recording on or off in all lanes. Benchmarks use this to measure the cost of recording.
  void turn(bool on);

 private:
  std::vector<std::shared_ptr<FlightTape>> tapes() const;
  std::optional<bool> write_in_time() const;

  const int rank_;
  const std::size_t entries_;
  const std::string path_;
  const std::chrono::milliseconds longest_write_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<std::weak_ptr<FlightTape>> tapes_;
  std::string said_;  // by account_before_abort
  mutable std::shared_future<bool> newest_write_;
  mutable std::mutex writing_;
};

// For catch blocks. If `error` means that ranks did not answer, failed or differ, this writes the
// flight record of `lanes` and throws the error with its path. Otherwise it throws `error` again.
[[noreturn]] void throw_with_flight_record(const Error& error, Lanes& lanes, Lanes* replicas);
// The same, and ends the lanes: abort_after_failure in core/lanes.h.
[[noreturn]] void throw_and_abort(const Error& error, Lanes& lanes, Lanes* replicas);

}  // namespace fsdp
