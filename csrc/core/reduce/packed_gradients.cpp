#include "core/reduce/packed_gradients.h"

#include <algorithm>
#include <iterator>

namespace fsdp {

void PackedGradients::note_arrival(Bucket& bucket) {
  note_stream(bucket.reduction.arrived_on_, device_.compute_stream());
}

void PackedGradients::follow_arrivals(const Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  for (void* const stream : bucket.reduction.arrived_on_) {
    if (stream != compute.native_handle()) {
      streams_.order_after(compute, device_.stream_of(stream), bucket.reduction.label);
    }
  }
}

void PackedGradients::collect(Bucket& bucket, const std::vector<Unit*>& units) {
  std::fill(bucket.reduction.gradients_.begin(), bucket.reduction.gradients_.end(), nullptr);
  void* const stream = device_.compute_stream().native_handle();
  packed_.push_back({&bucket, stream, {}, {}});
  std::copy_if(bucket.reduction.arrived_on_.begin(), bucket.reduction.arrived_on_.end(),
               std::back_inserter(packed_.back().other_streams),
               [stream](const void* other) { return other != stream; });
  std::vector<std::shared_ptr<void>>& keep_alive = packed_.back().keep_alive;
  keep_alive.reserve(units.size());
  for (Unit* unit : units) {
    const void** addresses = bucket.reduction.gradients_.data() + unit->first_trainable;
    keep_alive.push_back(unit->port.extract_gradients(addresses));
    // User code may have put gradients there that autograd did not bring.
    for (std::size_t i = 0; i < unit->gradients.count(); ++i) {
      if (addresses[i] != nullptr) {
        unit->gradients.arrive(i);
      }
    }
  }
}

void PackedGradients::make_room(const Bucket& bucket) {
  if (!packed_.empty() &&
      packed_.front().bucket->buffers.gradients + bucket.buffers.gradients > limit_bytes_) {
    free();
  }
}

void PackedGradients::free(bool measures_wait) {
  if (packed_.empty()) {
    return;
  }
  const Bucket& bucket = *packed_.front().bucket;
  if (measures_wait) {
    ledger_.wait(*bucket.reduction.packed_, bucket.reduction.label, Work::WaitForReduction,
                 bucket.numbers());
  } else {
    device_.compute_stream().wait(*bucket.reduction.packed_, bucket.reduction.label);
  }
  for (const Packed& gradients : packed_) {
    wait_for_packing(gradients, gradients.packed_by);
    for (void* const stream : gradients.other_streams) {
      wait_for_packing(gradients, stream);
    }
  }
  packed_.clear();
}

// See Note [gradients of several streams].
void PackedGradients::wait_for_packing(const Packed& gradients, void* stream) {
  if (stream != device_.compute_stream().native_handle()) {
    device_.stream_of(stream).wait(*gradients.bucket->reduction.packed_,
                                   gradients.bucket->reduction.label);
  }
}

}  // namespace fsdp
