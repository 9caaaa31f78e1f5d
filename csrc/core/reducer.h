// Turns one unit's gradients into its sharded gradient: pack, reduce-scatter, hand over. When
// that happens is the pipeline's business.
//
// Note [one reduce buffer]
// pack, reduce-scatter and hand-over of one unit run on the reduce stream in order, and those of
// the next unit after them. So one reduce input and one reduce output serve all units, and no
// event is needed between them.
//
// Note [gradient lifetime]
// Gradients are taken out of the unsharded parameters when they are packed, and packing runs on
// the reduce stream. They go when the compute stream, to whose allocator they return, has waited
// for that; no allocator need know of the reduce stream, and no host waits. The wait comes with
// the gradients of the unit after the next one: so much may be in flight, and no more than that
// is ever kept.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/lanes.h"
#include "core/ledger.h"
#include "core/unit.h"

namespace fsdp {

class Reducer {
 public:
  // Called right before a collective is issued.
  using Announce = std::function<void(Unit&, std::size_t bytes)>;

  // The lane outlives this, and may be shared with others.
  Reducer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce);
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Sizes the reduce input and output for `units`.
  void plan_memory(const std::vector<std::unique_ptr<Unit>>& units);

  // Packs what has arrived, adds what was accumulated, reduces over the ranks and hands over.
  void reduce(Unit& unit);
  // Packs what has arrived and adds it to what was accumulated, without communication.
  void accumulate(Unit& unit);
  // Makes the compute stream wait for every reduction launched so far.
  void wait(const std::vector<std::unique_ptr<Unit>>& units);
  // Forgets everything that is not reduced yet, after a backward that failed.
  void discard(Unit& unit);

  Stream& stream() { return stream_; }
  std::size_t buffer_bytes() const { return input_bytes_ + (output_ ? output_bytes_ : 0); }

 private:
  void take_gradients(Unit& unit);
  void pack(Unit& unit, void* destination, bool accumulate);
  // Returns whether the reduction may write the flat gradient itself.
  bool choose_finish(Unit& unit);
  void finish(Unit& unit, const void* output);
  void forget_arrived(Unit& unit);
  void release_packed_gradients(std::size_t keep);
  void* output_buffer();

  struct PackedGradients {
    Unit* unit;  // whose `packed` event is behind it
    std::shared_ptr<void> keep_alive;
  };

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  Stream& stream_;  // the lane's
  Ledger& ledger_;
  Announce announce_;
  std::unique_ptr<Event> compute_reached_;
  std::shared_ptr<void> input_;
  std::shared_ptr<void> output_;  // made when first needed
  std::size_t input_bytes_ = 0;
  std::size_t output_bytes_ = 0;
  std::deque<PackedGradients> packed_gradients_;
};

}  // namespace fsdp
