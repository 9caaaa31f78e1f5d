// Turns one bucket's gradients into its sharded gradient: pack, reduce-scatter, hand over. When
// that happens is the pipeline's business.
//
// Note [one reduce buffer]
// pack, reduce-scatter and hand-over of one bucket run on the reduce stream in order, and those of
// the next one after them. So one reduce input and one reduce output serve all buckets, and no
// event is needed between them. Pieces (Note [pieces] in core/lanes.h) have two halves of the
// input, and events.
//
// Note [gradient lifetime]
// Gradients are taken out of the unsharded parameters when they are packed, and packing runs on
// the reduce stream. They go when the compute stream, to whose allocator they return, has waited
// for that; no allocator need know of the reduce stream, and no host waits. The wait comes with
// the gradients of the bucket after the next one: so much may be in flight, and no more than that
// is ever kept.
//
// Note [units that differ]
// Settings of gradients may change at any time, also between forward and backward, so that they
// differ within a bucket: some of its units synchronise and some only accumulate, or divide by
// another factor. Each set of units that are alike is then reduced or accumulated by itself. The
// others take part in its reduction with zeros, or with what they have accumulated, and keep that.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/bucket.h"
#include "core/lanes.h"
#include "core/ledger.h"

namespace fsdp {

class Reducer {
 public:
  // Called right before a collective is issued.
  using Announce = std::function<void(const Bucket&, std::size_t bytes)>;

  // The lane outlives this, and may be shared with others.
  Reducer(Device& device, Packer& packer, Lane& lane, Ledger& ledger, Announce announce);
  ~Reducer();

  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Sizes the reduce input and output for `buckets`.
  void plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets);

  // Packs what has arrived of the units that synchronise, adds what was accumulated, reduces over
  // the ranks and hands over. Of the others it only accumulates what has arrived.
  void pack_and_reduce(Bucket& bucket);
  // Makes the compute stream wait for every reduction launched so far.
  void wait(const std::vector<std::unique_ptr<Bucket>>& buckets);
  // Forgets everything that is not reduced yet, after a backward that failed.
  void discard(Bucket& bucket);

  Stream& stream() { return stream_; }
  std::size_t buffer_bytes() const { return input_bytes_ + (output_ ? output_bytes_ : 0); }

 private:
  // `units` are alike, and some or all of the bucket's: Note [units that differ].
  using Units = std::vector<Unit*>;
  void take_units(Bucket& bucket, const Units& units);
  void reduce(Bucket& bucket, const Units& units);
  void accumulate(Bucket& bucket, const Units& units);
  void take_gradients(Bucket& bucket, const Units& units);
  Stream& begin_packing(const Bucket& bucket, bool into_accumulated);
  void note_sent(int half);
  void* accumulated_of(const Bucket& bucket, std::size_t piece);
  void* input_of(const Bucket& bucket, std::size_t piece);
  void pack(Bucket& bucket, const Units& units, std::size_t piece, void* destination,
            bool accumulate);
  void hand_over(Stream& from, Stream& to, const std::string& what);
  // Returns whether the reduction may write the flat gradient itself.
  bool choose_finish(Bucket& bucket, const Units& units);
  void finish(Bucket& bucket, const Units& units, std::size_t piece, const void* output);
  void hand_over_gradients(Bucket& bucket, const Units& units);
  void clear_accumulated(Bucket& bucket, const Units& units);
  void clear_rows(Bucket& bucket, const Unit& unit);
  void release_packed_gradients(std::size_t keep);
  void* output_buffer();

  struct PackedGradients {
    Bucket* bucket;  // whose `packed` event is behind it
    std::vector<std::shared_ptr<void>> keep_alive;
  };

  Device& device_;
  Packer& packer_;
  Lane& lane_;
  Stream& stream_;  // the lane's
  Ledger& ledger_;
  Announce announce_;
  std::unique_ptr<Event> compute_reached_;
  std::unique_ptr<Event>
      handed_over_;  // between streams of the lane, issued and waited for at once
  // Pieces use the two halves in turns, everything else, in order on stream_, the whole.
  std::shared_ptr<void> input_;
  std::unique_ptr<Event> sent_[2];      // of each half
  std::shared_ptr<void> output_;        // made when first needed
  std::unique_ptr<Event> output_read_;  // what was reduced into it last
  bool any_cut_ = false;                // of the buckets
  std::size_t input_bytes_ = 0;
  std::size_t output_bytes_ = 0;
  std::deque<PackedGradients> packed_gradients_;
};

}  // namespace fsdp
