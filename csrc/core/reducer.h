// Reduces a bucket's gradients to its sharded gradient: pack, reduce-scatter, finish (cast or add
// into the flat gradient). The pipeline decides when.
//
// Note [one reduce buffer]
// pack, reduce-scatter and finish of one bucket run on the reduce stream in order, and those of the
// next bucket after them. So one reduce input and one reduce output serve all buckets without
// events between them. Pieces (Note [pieces] in core/lanes.h) use the two halves of the input in
// turns, and events.
//
// Note [gradient lifetime]
// Gradients leave the unsharded parameters when they are packed, which happens on the reduce
// stream. They are freed after the compute stream, to whose allocator they return, has waited for
// the packing. So no allocator has to know the reduce stream, and the host does not wait. The wait
// is issued with the gradients of the bucket after the next one, which bounds how many gradients
// are in flight.
//
// Note [units that differ]
// Gradient settings may change at any time, also between forward and backward, so the units of a
// bucket may differ: some synchronise and some accumulate, or they divide by different factors.
// Each set of units with equal settings is then reduced or accumulated separately. A message of the
// bucket carries zeros, or what they have accumulated, for its other units. These keep their
// accumulated gradients.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "core/bucket.h"
#include "core/lanes.h"
#include "core/ledger.h"
#include "core/pieces.h"

namespace fsdp {

class Reducer {
 public:
  // The lane outlives this, and may be shared with others.
  Reducer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce);
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Allocates the reduce input for `buckets`, and sizes the reduce output.
  void plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets);

  // Packs the gradients that have arrived. For units that synchronise, it adds the accumulated
  // gradients, reduces over the ranks and sets the sharded gradients. For the others, it
  // accumulates.
  void pack_and_reduce(Bucket& bucket);
  // Makes the compute stream wait for every reduction that was issued so far.
  void wait(const std::vector<std::unique_ptr<Bucket>>& buckets);
  // Drops all gradients that are not reduced yet, after a backward that failed.
  void discard(Bucket& bucket);

  std::size_t buffer_bytes() const { return input_.bytes() + (output_ ? output_bytes_ : 0); }

 private:
  // Some or all units of a bucket, which are alike: Note [units that differ].
  using Units = std::vector<Unit*>;

  struct Reduction {
    Bucket& bucket;
    const Units& units;
    bool in_place;  // the reduce-scatter can write the flat gradient
    char* output;   // of the reduce-scatter
    Issue issue;
    Stream& before;
    Stream& after;
  };

  void pack_and_reduce_alike(Bucket& bucket, const Units& units);
  void accumulate(Bucket& bucket, const Units& units);
  void reduce(Bucket& bucket, const Units& units);
  Reduction begin_reduction(Bucket& bucket, const Units& units, bool in_place);
  void reduce_piece(const Reduction& reduction, std::size_t number);
  void send(const Reduction& reduction, const ReducePiece& piece, const void* input);
  void end_reduction(const Reduction& reduction);

  Stream& begin_packing(const Bucket& bucket, bool into_accumulated);
  void* input_of(const Reduction& reduction, std::size_t piece);
  void release_input(const Bucket& bucket, std::size_t piece);
  void pack(Bucket& bucket, const Units& units, std::size_t piece, void* destination,
            bool accumulate);
  void leave_held_gradients(Bucket& bucket);
  // Returns whether the reduction can write the flat gradient.
  bool prepare_finish(Bucket& bucket, const Units& units);
  void finish(Bucket& bucket, const Units& units, std::size_t piece, const void* output);
  char* output_buffer();

  void clear_accumulated(Bucket& bucket, const Units& units);
  void clear_accumulated_of(Bucket& bucket, const Unit& unit);
  void collect_gradients(Bucket& bucket, const Units& units);
  void free_packed_gradients(std::size_t keep);

  struct PackedGradients {
    Bucket* bucket;  // its `packed` event completes when they are packed
    std::vector<std::shared_ptr<void>> keep_alive;
  };

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  LaneStreams streams_;
  Ledger& ledger_;
  Announce announce_;
  HalvedBuffer input_;
  std::shared_ptr<void> output_;  // allocated when first needed
  std::size_t output_bytes_ = 0;
  std::unique_ptr<Event> output_read_;  // by the last finish
  std::deque<PackedGradients> packed_gradients_;
};

}  // namespace fsdp
