// The gradients of buckets, from their arrival until they are packed and freed.
//
// Note [gradient lifetime]
// Gradients leave the unsharded parameters when they are packed, which happens on a stream of the
// lane. They are freed after the compute stream, to whose allocator they return, has waited for the
// packing. So no allocator has to know the other stream, and the host does not wait. The wait is
// issued when backward has passed the next bucket. If the gradients of both buckets would be more
// than ReduceMemory::most_gradients, it is issued when backward enters the next bucket, or returns
// to it from a unit inside, before autograd makes these gradients. Each rank decides by itself.
//
// Note [gradients of several streams]
// A user may run parts of a unit on streams of their own. Autograd then runs their backward on the
// same streams, and the compute stream of a gradient's hook is the stream that the gradient arrived
// on. So gradients of one bucket may arrive on several streams. Before they are packed, the compute
// stream of that moment waits for the others. After that, each of these streams waits for the
// packing before the gradients are freed, because each allocator's stream reuses its own memory.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/memory/pieces.h"
#include "core/record/ledger.h"
#include "core/units/bucket.h"
#include "device/stream.h"

namespace fsdp {

class PackedGradients {
 public:
  // All of these outlive this.
  PackedGradients(Device& device, LaneStreams& streams, Ledger& ledger)
      : device_(device), streams_(streams), ledger_(ledger) {}

  void set_limit(std::size_t bytes) { limit_bytes_ = bytes; }

  // A gradient of the bucket has arrived on the compute stream.
  void note_arrival(Bucket& bucket);
  // Makes the compute stream wait for the other streams on which gradients arrived.
  void follow_arrivals(const Bucket& bucket);
  // Moves the units' gradients out of their parameters, and keeps them. The caller packs them.
  void collect(Bucket& bucket, const std::vector<Unit*>& units);
  // Autograd makes gradients of the bucket from now on. Frees those that are packed if there would
  // be too many.
  void make_room(const Bucket& bucket);
  // Makes the streams of the gradients wait for the packing, and frees the gradients. The ledger
  // measures the wait unless it is a part of another one.
  void free(bool measures_wait = true);

 private:
  struct Packed {
    Bucket* bucket;                    // its `packed` event completes when they are packed
    void* packed_by;                   // the handle of the compute stream at that time
    std::vector<void*> other_streams;  // on which gradients arrived
    std::vector<std::shared_ptr<void>> keep_alive;
  };

  void wait_for_packing(const Packed& gradients, void* stream);

  Device& device_;
  LaneStreams& streams_;
  Ledger& ledger_;
  std::vector<Packed> packed_;  // of one bucket, whose event tells when all of them are packed
  std::size_t limit_bytes_ = 0;
};

}  // namespace fsdp
