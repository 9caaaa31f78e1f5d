// How a reducer takes gradients from the units and packs them into the reduce input.
#include <algorithm>
#include <iterator>

#include "core/reduce/reducer.h"

namespace fsdp {

// Returns the stream that packs the bucket, ordered after the compute stream. Packing into the
// accumulated gradients also waits for all messages that read them.
Stream& Reducer::begin_packing(const Bucket& bucket, bool into_accumulated) {
  Stream& before = streams_.before(packs_apart(bucket));
  if (packs_apart(bucket)) {
    streams_.order_after_compute(before);
    if (into_accumulated) {
      input_.wait_for_both(before, bucket.reduction.label);
    }
  }
  return before;
}

void Reducer::pack(Bucket& bucket, const Units& units, std::size_t number, void* destination,
                   bool accumulate) {
  const UnitLayout& layout = bucket.layout;
  const ReducePiece& piece = bucket.reduction.pieces_[number];
  const void* const* gradients = bucket.reduction.gradients_.data() + piece.first_trainable;
  const void* first_row = nullptr;
  if (piece.part.is_of_rows() && *gradients != nullptr) {
    first_row =
        static_cast<const char*>(*gradients) +
        static_cast<std::size_t>(piece.gradient_offset) * itemsize(piece.gradient_dtypes.front());
    gradients = &first_row;
  }
  Stream& stream = streams_.before(packs_apart(bucket));
  const Timed timed(ledger_, stream, Work::Pack, bucket.numbers());
  for (const DType dtype : piece.gradient_dtypes) {
    // The first pass writes zeros where it has no gradient. Later passes add theirs.
    const bool adds = accumulate || dtype != piece.gradient_dtypes.front();
    packer_.pack(stream, piece.pack_plan, gradients_of(bucket, piece, gradients, dtype), dtype,
                 destination, layout.reduce_dtype(), units.front()->pre_scale, adds,
                 {bucket.units.front()->gradients.nonfinite_marks_ + piece.first_trainable,
                  device_.is_capturing() ? kCapturedPacking : packings_});
    ledger_.counters().copied_bytes += static_cast<std::size_t>(piece.pack_plan.segment_numel) *
                                       static_cast<std::size_t>(layout.world_size()) *
                                       (itemsize(dtype) + itemsize(layout.reduce_dtype()));
  }
}

// The piece's gradients of one dtype. Gradients of other dtypes are left out.
const void* const* Reducer::gradients_of(Bucket& bucket, const ReducePiece& piece,
                                         const void* const* gradients, DType dtype) {
  if (piece.gradient_dtypes.size() == 1) {
    return gradients;
  }
  for (std::size_t i = 0; i < piece.pack_plan.entries.size(); ++i) {
    const bool has_dtype = bucket.reduction.gradient_dtypes_[piece.first_trainable + i] == dtype;
    bucket.reduction.gradients_of_dtype_[i] = has_dtype ? gradients[i] : nullptr;
  }
  return bucket.reduction.gradients_of_dtype_.data();
}

// The messages issued so far are the last to read the piece's input.
void Reducer::release_input(const Bucket& bucket, std::size_t half) {
  if (packs_apart(bucket)) {
    input_.release_half(streams_.messages(), half);
  } else if (packs_ahead_ || streams_.is_any_in_pieces()) {
    input_.release_both(streams_.messages());
  }
}

// See Note [gradient lifetime].
void Reducer::collect_gradients(Bucket& bucket, const Units& units) {
  std::fill(bucket.reduction.gradients_.begin(), bucket.reduction.gradients_.end(), nullptr);
  void* const stream = device_.compute_stream().native_handle();
  packed_gradients_.push_back({&bucket, stream, {}, {}});
  std::copy_if(bucket.reduction.arrived_on_.begin(), bucket.reduction.arrived_on_.end(),
               std::back_inserter(packed_gradients_.back().other_streams),
               [stream](const void* other) { return other != stream; });
  std::vector<std::shared_ptr<void>>& keep_alive = packed_gradients_.back().keep_alive;
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

// They are those of one bucket, whose event tells when all of them are packed.
void Reducer::free_packed_gradients(bool measures_wait) {
  if (packed_gradients_.empty()) {
    return;
  }
  const Bucket& bucket = *packed_gradients_.front().bucket;
  if (measures_wait) {
    ledger_.wait(*bucket.reduction.packed_, bucket.reduction.label, Work::WaitForReduction,
                 bucket.numbers());
  } else {
    device_.compute_stream().wait(*bucket.reduction.packed_, bucket.reduction.label);
  }
  for (const PackedGradients& gradients : packed_gradients_) {
    wait_for_packing(gradients, gradients.packed_by);
    for (void* const stream : gradients.other_streams) {
      wait_for_packing(gradients, stream);
    }
  }
  packed_gradients_.clear();
}

// See Note [gradients of several streams].
void Reducer::wait_for_packing(const PackedGradients& gradients, void* stream) {
  if (stream != device_.compute_stream().native_handle()) {
    device_.stream_of(stream).wait(*gradients.bucket->reduction.packed_,
                                   gradients.bucket->reduction.label);
  }
}

}  // namespace fsdp
