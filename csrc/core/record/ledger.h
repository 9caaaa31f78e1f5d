// What the schedule did. Counters are always on. A log of collectives can be switched on for tests.
// For measurements the ledger also records when every piece of work was issued, began and ended.
//
// Only the thread that runs the schedule writes to it.
//
// Note [times]
// The time of a moment is known only when its stream has reached it. So nothing is read and nothing
// is waited for before take_times. The ledger keeps a fixed number of iterations and overwrites the
// oldest. An iteration's moments and spans reuse the memory of the one they overwrite, so a ledger
// that stays on allocates nothing after that many iterations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/stream.h"

namespace fsdp {

enum class Collective : std::uint8_t { AllGather, ReduceScatter, AllReduce, GroupAllGather };
enum class Phase : std::uint8_t { Forward, Backward, Other };

constexpr const char* name(Phase phase) {
  return phase == Phase::Forward ? "forward" : phase == Phase::Backward ? "backward" : "other";
}

// The numbers of a unit or of the first and the last unit of a bucket.
struct UnitRange {
  int first = 0;
  int last = 0;
};

constexpr UnitRange kAllUnits{-1, -1};

struct CollectiveRecord {
  Collective op;
  Phase phase;
  UnitRange units;    // of the bucket
  std::size_t bytes;  // S of nccl-tests: of all ranks, after a gather or before a reduction; of one
                      // rank in an all-reduce
};

struct Counters {
  std::uint64_t all_gathers = 0;
  std::uint64_t reduce_scatters = 0;
  std::uint64_t all_reduces = 0;        // over replicas
  std::uint64_t group_all_gathers = 0;  // over a smaller group: Note [group shards]
  std::uint64_t reused_unshards = 0;    // buckets unsharded again without a collective
  std::uint64_t dropped_gathers = 0;    // gathers of buckets that no unit used
  std::uint64_t overflow_slots = 0;     // allocated outside the ring
  std::uint64_t wire_bytes = 0;         // sum of S over all collectives
  std::uint64_t copied_bytes = 0;       // read plus written by pack, unpack and cast
  std::uint64_t unsharded_bytes = 0;    // of buckets with a unit that is gathering or unsharded now
  std::uint64_t peak_unsharded_bytes = 0;
  int unsharded_units = 0;  // gathering or unsharded now
  int peak_unsharded_units = 0;

  void add_unsharded_unit() {
    unsharded_units += 1;
    peak_unsharded_units = std::max(peak_unsharded_units, unsharded_units);
  }
  void remove_unsharded_unit() { unsharded_units -= 1; }
  void add_unsharded_bytes(std::size_t bytes) {
    unsharded_bytes += bytes;
    peak_unsharded_bytes = std::max(peak_unsharded_bytes, unsharded_bytes);
  }
  void remove_unsharded_bytes(std::size_t bytes) { unsharded_bytes -= bytes; }
};

// The kinds from Cast to FinishReduction, GroupGather, Keep and Update run on the streams of the
// lanes, the others on the compute stream. A unit's forward and backward include the units inside
// it and the waits.
enum class Work : std::uint8_t {
  Cast,
  Gather,
  Unpack,
  Pack,
  Reduce,
  AllReduce,  // over replicas
  FinishReduction,
  WaitForGather,
  WaitForReduction,
  UnitForward,
  UnitBackward,
  Forward,
  Backward,
  GroupGather,  // Note [group shards] in core/gather/bucket_gather.h
  Keep,         // the copy of a slot to a group shard
  Update,       // Note [updates in backward] in core/reduce/unit_update.h
  Step,         // such an update on the compute stream, or a step() after backward
};

// The issue time of a collective, and the earliest time it could have been issued.
struct Issue {
  std::int64_t at = 0;         // host clock: device/host_clock.h
  std::int64_t refused = 0;    // when a prefetch first found no free slot; 0: never
  std::int32_t possible = -1;  // the moment at which its slot was free or its gradients were there
  bool on_demand = false;      // not prefetched
};

// A piece of work between two moments of its iteration.
struct WorkSpan {
  static constexpr std::int32_t kNever = -1;

  Work work = Work::Cast;
  Phase phase = Phase::Other;
  UnitRange units;
  std::int32_t begin = kNever;
  std::int32_t end = kNever;         // kNever: an exception left the span open
  std::int32_t collective = kNever;  // index into the iteration's collectives
};

struct IssuedCollective {
  std::size_t bytes = 0;  // as CollectiveRecord::bytes
  Issue issue;
};

// The number of a moment or of a span. It is valid in one iteration only.
struct IterationIndex {
  std::int32_t number = WorkSpan::kNever;
  std::uint64_t iteration = 0;
};

// A span with its times, in seconds of the steady clock. Times that are not known are 0.
struct TimedSpan {
  WorkSpan span;
  IssuedCollective collective;  // if the span is one
  double begin;
  double end;
  double possible;
  double issued;
  double refused;
  double lead;  // from the host marking its begin to the stream reaching it (Moments::lead)
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
  void reset();  // everything except what is unsharded now

  void enable_log(bool enabled) { logging_ = enabled; }
  // Returns the collectives that were logged since the last call, and forgets them.
  std::vector<CollectiveRecord> take_log() { return std::exchange(log_, {}); }

  void count_collective(Collective op, UnitRange units, std::size_t bytes);

  // A forward or backward begins or ends. The work between belongs to `phase`.
  void begin_pass(Phase phase, Work work) {
    phase_ = phase;
    pass_ = open(compute_, work, kAllUnits);
  }
  void end_pass() {
    close(pass_, compute_);
    phase_ = Phase::Other;
  }
  Phase phase() const { return phase_; }

  // - Times. The ledger keeps the last `iterations` iterations, from the next one on; 0: none.
  // `moments` is roughly how many each of them marks. Pass `drained` if no stream has work left.
  // Otherwise the memory of earlier moments stays allocated, since a stream may still write to it.
  void keep_times(std::size_t iterations, std::size_t moments, bool drained);
  bool has_times() const { return now_ != nullptr; }
  void begin_iteration();
  // Later work belongs to no iteration and no pass.
  void leave_iteration() {
    now_ = nullptr;
    phase_ = Phase::Other;
  }
  // Whether the iteration has so many moments that a new one should begin.
  bool is_full() const { return now_ != nullptr && now_->marked > kMostMoments; }

  IterationIndex open(Stream& stream, Work work, UnitRange units) {
    return has_times() ? open_at(mark(stream), work, units) : IterationIndex{};
  }
  void close(IterationIndex& span, Stream& stream) {
    if (span.number != WorkSpan::kNever) {
      end_span(span, stream);
    }
  }
  // Opens the span of a unit's forward or backward. A unit that runs again before its backward has
  // passed it gets a new span. The span begins where the wait for its gather ended, if there was
  // one.
  void open_unit(IterationIndex& span, Work work, int unit, bool has_waited);
  // Makes the compute stream wait for `event`, and records a span unless it had completed already.
  void wait(Event& event, const std::string& what, Work work, UnitRange units);
  // Marks a moment of the compute stream. Returns WorkSpan::kNever if no times are kept.
  std::int32_t mark_compute();
  // Record a span of the compute stream from the begin to the end of an optimizer's step(). Two
  // kinds are not recorded: a step() whose closure begins an iteration, and a step() that another
  // step() calls.
  void begin_step();
  void end_step();
  IterationIndex last_compute_moment() const { return last_compute_moment_; }
  // WorkSpan::kNever if the moment is one of another iteration.
  std::int32_t number_of(const IterationIndex& moment) const {
    return has_times() && moment.iteration == now_->number ? moment.number : WorkSpan::kNever;
  }

  // Returns all iterations that are kept, the oldest first, and forgets them. Synchronize all
  // streams first.
  std::vector<IterationTimes> take_times();
  std::uint64_t lost_iterations() const { return lost_; }

 private:
  struct Iteration {
    std::unique_ptr<Moments> moments;
    std::int32_t marked = 0;
    std::uint64_t number = 0;  // counts all iterations; 0: this one is unused
    std::vector<WorkSpan> spans;
    std::vector<IssuedCollective> collectives;
  };

  friend class Timed;

  static constexpr std::int32_t kMostMoments = 1 << 16;

  // Opens a span that begins at a moment already marked. Call it only if has_times().
  IterationIndex open_at(std::int32_t begin, Work work, UnitRange units) {
    now_->spans.push_back({work, phase_, units, begin});
    return {static_cast<std::int32_t>(now_->spans.size()) - 1, now_->number};
  }
  // Opens the span of a collective. With `follows` it begins at the moment that was marked last,
  // at which a copy on the same stream ended.
  IterationIndex open(Stream& stream, Work work, UnitRange units,
                      const IssuedCollective& collective, bool follows);
  void end_span(IterationIndex& span, Stream& stream);
  IterationTimes times_of(const Iteration& iteration, double begin) const;
  std::int32_t mark(Stream& stream);

  Device& device_;
  Stream& compute_;
  Counters counters_;
  bool logging_ = false;
  std::vector<CollectiveRecord> log_;

  std::vector<Iteration> iterations_;  // overwritten in turns
  std::vector<Iteration> retired_;     // streams may still write to these
  std::uint64_t begun_ = 0;
  std::uint64_t begun_before_ = 0;  // before times were kept
  std::uint64_t lost_ = 0;          // overwritten iterations
  Iteration* now_ = nullptr;        // the current one, if its times are kept
  Phase phase_ = Phase::Other;
  IterationIndex pass_;  // the span of forward or backward
  IterationIndex last_compute_moment_;
  IterationIndex step_;  // the moment at which the outermost step() began
  int inner_steps_ = 0;  // step() calls inside it that have not ended
};

// Records what is issued to `stream` during its lifetime as one span.
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
  IterationIndex span_;
};

}  // namespace fsdp
