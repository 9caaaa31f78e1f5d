// What the schedule did: counters that are always on, and a log of collectives that tests and
// reports switch on. Written by the thread that runs the schedule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

class Ledger {
 public:
  const Counters& counters() const { return counters_; }
  Counters& counters() { return counters_; }
  void reset();  // all but what is unsharded now

  void enable_log(bool enabled) { logging_ = enabled; }
  const std::vector<CollectiveRecord>& log() const { return log_; }
  void clear_log() { log_.clear(); }

  void collective(Collective op, Phase phase, int first_unit, int last_unit, std::size_t bytes);
  void copied(std::size_t bytes) { counters_.copied_bytes += bytes; }
  // Units that begin to hold unsharded parameters, or end to, and memory that they begin to hold.
  void unsharded(int units, std::size_t bytes);
  void resharded(int units, std::size_t bytes);

 private:
  Counters counters_;
  bool logging_ = false;
  std::vector<CollectiveRecord> log_;
};

}  // namespace fsdp
