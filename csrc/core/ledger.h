// What the schedule did: counters that are always on; a log of collectives that tests switch on;
// and, for who measures, when everything was issued, began and ended.
//
// Written by the thread that runs the schedule.
//
// Note [times]
// What a span's moments are is known when its streams have come so far, so nothing is read, and
// nothing waited for, before take_times. Iterations take turns in a fixed number of places; in
// each, moments and spans of an earlier one are written over, so that a ledger that is left on
// allocates nothing after as many iterations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/stream.h"

namespace fsdp {

enum class Collective : std::uint8_t { AllGather, ReduceScatter };
enum class Phase : std::uint8_t { Forward, Backward, Other };

struct CollectiveRecord {
  Collective op;
  Phase phase;
  int unit;           // the first of the bucket's
  int last_unit;      // the last of the bucket's
  std::size_t bytes;  // S of nccl-tests: over all ranks, as gathered or before the reduction
};

struct Counters {
  std::uint64_t all_gathers = 0;
  std::uint64_t reduce_scatters = 0;
  std::uint64_t reused_unshards = 0;  // buckets unsharded again by the pointer alone
  std::uint64_t overflow_slots = 0;   // taken outside the ring
  std::uint64_t wire_bytes = 0;       // sum of S over all collectives
  std::uint64_t copied_bytes = 0;     // read plus written by pack, unpack and cast
  std::uint64_t unsharded_bytes = 0;  // of buckets with a unit that is gathering or unsharded now
  std::uint64_t peak_unsharded_bytes = 0;
  int unsharded_units = 0;  // gathering or unsharded now
  int peak_unsharded_units = 0;
};

// Cast to HandOver are on the lanes' streams; the others on the compute stream: waits, what units
// compute (with units that they enclose, and waits in it), and the two passes.
enum class Work : std::uint8_t {
  Cast,
  Gather,
  Unpack,
  Pack,
  Reduce,
  HandOver,
  WaitForGather,
  WaitForReduction,
  UnitForward,
  UnitBackward,
  Forward,
  Backward,
};

// Of the unit, or of a bucket.
struct UnitRange {
  int first = 0;
  int last = 0;
};

constexpr UnitRange kAllUnits{-1, -1};

// When a collective was issued, and what it may have had to wait for before.
struct Issue {
  std::int64_t at = 0;         // by the host: device/host_clock.h
  std::int64_t refused = 0;    // when it was first to be gathered ahead and had no slot; 0: never
  std::int32_t possible = -1;  // the moment at which the slot was free, or the gradients there
  bool on_demand = false;      // and not ahead
};

struct WorkSpan {
  static constexpr std::int32_t kNever = -1;

  Work work = Work::Cast;
  Phase phase = Phase::Other;
  UnitRange units;
  std::int32_t begin = kNever;       // moments of the iteration
  std::int32_t end = kNever;         // never: it was not ended, by an exception say
  std::int32_t collective = kNever;  // of those that the iteration has issued
};

struct IssuedCollective {
  std::size_t bytes = 0;  // of all ranks together
  Issue issue;
};

// A moment, which is none of another iteration's.
struct MomentOf {
  std::int32_t number = WorkSpan::kNever;
  std::uint64_t iteration = 0;
};

// Which span is to be ended.
struct OpenSpan {
  std::int32_t number = WorkSpan::kNever;
  std::uint64_t iteration = 0;
};

// A span whose moments are known: seconds of the steady clock, 0 for those that never came.
struct TimedSpan {
  WorkSpan span;
  IssuedCollective collective;  // if it is one
  double begin;
  double end;
  double possible;
  double issued;
  double refused;
  double lead;  // of its begin: how long after the host had come there (Moments::lead)
};

struct IterationTimes {
  std::uint64_t number;          // from 1 on, since times are kept
  std::vector<TimedSpan> spans;  // in order of issue
};

class Ledger {
 public:
  explicit Ledger(Device& device) : device_(device), compute_(device.compute_stream()) {}

  const Counters& counters() const { return counters_; }
  Counters& counters() { return counters_; }
  void reset();  // all but what is unsharded now

  void enable_log(bool enabled) { logging_ = enabled; }
  const std::vector<CollectiveRecord>& log() const { return log_; }
  void clear_log() { log_.clear(); }

  void collective(Collective op, UnitRange units, std::size_t bytes);
  void copied(std::size_t bytes) { counters_.copied_bytes += bytes; }
  // Units that begin to hold unsharded parameters, or end to, and memory that they begin to hold.
  void unsharded(int units, std::size_t bytes);
  void resharded(int units, std::size_t bytes);

  // What is issued from now on belongs to it.
  void enter(Phase phase) { phase_ = phase; }

  // - Times. They are kept from the next iteration on, of the last `iterations` ones; 0: no more.
  // `moments`: of each, about. `drained`: no stream has anything left to do; else what may still be
  // written stays as long as the ledger.
  void keep_times(std::size_t iterations, std::size_t moments, bool drained);
  bool has_times() const { return now_ != nullptr; }
  void begin_iteration();
  // What comes now belongs to no iteration.
  void leave_iteration() { now_ = nullptr; }
  // Too much to go on in the same iteration.
  bool is_full() const { return now_ != nullptr && now_->marked > kMostMoments; }

  OpenSpan open(Stream& stream, Work work, UnitRange units) {
    return has_times() ? open_at(mark(stream), work, units) : OpenSpan{};
  }
  // From a moment that is marked already. Where has_times().
  OpenSpan open_at(std::int32_t begin, Work work, UnitRange units) {
    now_->spans.push_back({work, phase_, units, begin});
    return {static_cast<std::int32_t>(now_->spans.size()) - 1, now_->number};
  }
  // One that is on the wire. `follows`: copies right before it, on the same stream, end where it
  // begins.
  OpenSpan open(Stream& stream, Work work, UnitRange units, const IssuedCollective& collective,
                bool follows);
  void close(OpenSpan& span, Stream& stream) {
    if (span.number != WorkSpan::kNever) {
      end_span(span, stream);
    }
  }
  // Makes the compute stream wait, and writes down how long if it was not there already.
  void wait(Event& event, const std::string& what, Work work, UnitRange units);
  // The compute stream is here; WorkSpan::kNever where no times are kept.
  std::int32_t mark_compute();
  // Where the compute stream was marked last.
  MomentOf last_of_compute() const { return last_of_compute_; }
  // WorkSpan::kNever if that was in another iteration.
  std::int32_t number_of(const MomentOf& moment) const {
    return has_times() && moment.iteration == now_->number ? moment.number : WorkSpan::kNever;
  }

  // All iterations that are kept, the oldest first, which are then forgotten. All streams have
  // come to their end.
  std::vector<IterationTimes> take_times();
  std::uint64_t lost_iterations() const { return lost_; }

 private:
  struct Iteration {
    std::unique_ptr<Moments> moments;
    std::int32_t marked = 0;
    std::uint64_t number = 0;  // of all there have been; 0: none
    std::vector<WorkSpan> spans;
    std::vector<IssuedCollective> collectives;
  };

  static constexpr std::int32_t kMostMoments = 1 << 16;

  void end_span(OpenSpan& span, Stream& stream);
  IterationTimes times_of(const Iteration& iteration, double begin) const;
  std::int32_t mark(Stream& stream);

  Device& device_;
  Stream& compute_;
  Counters counters_;
  bool logging_ = false;
  std::vector<CollectiveRecord> log_;

  std::vector<Iteration> iterations_;  // in turns
  std::vector<Iteration> retired_;     // that streams may still write to
  std::uint64_t begun_ = 0;
  std::uint64_t begun_before_ = 0;  // when times began to be kept
  std::uint64_t lost_ = 0;          // that were written over
  Iteration* now_ = nullptr;        // that runs, if its times are kept
  Phase phase_ = Phase::Other;
  MomentOf last_of_compute_;
};

// What is issued to `stream` while this lives is one span.
class Timed {
 public:
  Timed(Ledger& ledger, Stream& stream, Work work, UnitRange units)
      : ledger_(ledger), stream_(stream), span_(ledger.open(stream, work, units)) {}
  Timed(Ledger& ledger, Stream& stream, Work work, UnitRange units,
        const IssuedCollective& collective, bool follows)
      : ledger_(ledger),
        stream_(stream),
        span_(ledger.open(stream, work, units, collective, follows)) {}
  ~Timed() { ledger_.close(span_, stream_); }

  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Ledger& ledger_;
  Stream& stream_;
  OpenSpan span_;
};

}  // namespace fsdp
