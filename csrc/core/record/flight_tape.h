// The newest collectives on the lanes of one group of ranks, and the progress of each.
//
// Note [flight records]
// Our collectives bypass c10d, so PyTorch's Flight Recorder sees none of them. The tape records the
// same facts: when each collective was issued, and whether its stream has begun and ended it. It
// always records, because nobody knows in advance which step will hang. So it has a fixed ring of
// entries. An entry costs two moments (device/stream.h) and no allocation, and nothing waits for a
// moment. When communication fails, or when a user asks for it, a flight record is made of the
// tapes of a rank's lanes (core/record/flight_recorder.h).
//
// - A stream that has failed reaches no further moments. So a collective that has failed, and those
//   behind it, stay incomplete in the record.
// - NCCL's watchdog ends kernels that hang, and after that they look complete. So the watchdog
//   writes the record first: Communicator::set_flight_writer.
// - A captured CUDA graph runs later. Its collectives are not recorded.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "comm/communicator.h"
#include "core/record/ledger.h"
#include "device/stream.h"

namespace fsdp {

// The description of a collective when it is issued.
struct FlightPlan {
  Collective op;
  Phase phase;
  std::size_t bytes;  // as CollectiveRecord::bytes
  DType dtype;
};

struct Flight {
  std::shared_ptr<const FlightGroup> group;
  std::uint64_t number = 0;    // counts the tape's from 1; an entry with 0 is empty
  std::uint64_t sequence = 0;  // counts the group's from 1
  std::int64_t issued = 0;     // ticks of device/host_clock.h
  FlightPlan plan{};
  bool is_whole = false;  // its end was issued, too
  char label[96] = {};    // "the all-gather of unit 'layers.0'"
};

enum class FlightState : std::uint8_t { Scheduled, Started, Completed };

// An entry, and the progress of its collective.
struct SeenFlight {
  Flight flight;
  FlightState state = FlightState::Scheduled;
  std::int64_t started = 0;       // ticks; 0: the hardware has another clock, or it has not started
  std::int64_t completed = 0;     // the same
  std::optional<double> seconds;  // between the two
  std::chrono::milliseconds timeout{};  // of its lane
};

class FlightTape {
 public:
  // Keeps the newest `entries` collectives.
  FlightTape(Device& device, std::size_t entries);

  // Returns the number of the entry. The collective is issued to `stream` between these two calls.
  // `over` has a flight group.
  std::uint64_t begin(Stream& stream, const Communicator& over, const FlightPlan& plan,
                      const std::string& label);
  void end(std::uint64_t number, Stream& stream);

  // Turns recording on or off: FlightRecorder::turn.
  void turn(bool on) { is_on_ = on; }

  // Call it once on a new thread that is going to look.
  void enter_thread() const { device_.allow_event_queries_during_capture(); }
  // Returns the entries that are kept, the oldest first. Any thread may call this. Another thread
  // may be in begin or end at that time, and CUDA may block it there. This then waits for a second
  // and returns nullopt.
  std::optional<std::vector<SeenFlight>> look() const;

 private:
  Flight& entry(std::uint64_t number) { return entries_[(number - 1) % entries_.size()]; }
  std::size_t first_moment(std::uint64_t number) const {
    return 2 * static_cast<std::size_t>((number - 1) % entries_.size());
  }
  SeenFlight see(const Flight& flight) const;

  Device& device_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> is_on_{true};
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Flight> entries_;
  std::unique_ptr<Moments> moments_;  // two of each entry
  std::uint64_t issued_ = 0;
};

// Records the collective that is issued to `stream` during this object's lifetime. `tape` may be
// null.
class InFlight {
 public:
  InFlight(FlightTape* tape, Stream& stream, const Communicator& over, const FlightPlan& plan,
           const std::string& label);
  ~InFlight();

  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

 private:
  FlightTape* tape_;
  Stream& stream_;
  int exceptions_;
  std::uint64_t number_ = 0;  // 0: not recorded
};

}  // namespace fsdp
