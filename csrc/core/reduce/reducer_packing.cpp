// How a reducer takes gradients from the units and packs them into the reduce input.
#include <algorithm>
#include <iterator>

#include "core/reduce/reducer.h"

namespace fsdp {

// See Note [lent gradients].
void Reducer::lend_gradients(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  if (device_.is_host() || device_.is_capturing()) {
    return;
  }
  for (const auto& bucket : buckets) {
    const BucketReduction& reduction = bucket->reduction;
    if (!bucket->layout.is_offloaded() && !reduction.is_pending_ && !reduction.into_window_ &&
        bucket->gradient_bytes() > 0 && !bucket->has_lent_gradients() &&
        !bucket->uses_gradient_memory()) {
      lend(*bucket);
    }
  }
}

// After a backward() on another stream, only that stream has waited for the reductions. The memory
// returns to the pool of its owner, which may be yet another stream.
void Reducer::lend(Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  void* const handle = compute.native_handle();
  if (bucket.reduction.waited_on_ != handle) {
    compute.wait(*bucket.reduction.reduced_, bucket.reduction.label);
  }
  if (bucket.gradient_stream() != handle) {
    Stream& owner = device_.stream_of(bucket.gradient_stream());
    streams_.order_after(owner, compute, bucket.reduction.label);
  }
  bucket.lend_gradients(handle);
}

void Reducer::return_gradients(Bucket& bucket) {
  if (bucket.has_lent_gradients()) {
    renew_gradients(bucket);
    // The compute stream has written zeros to padding. It may be another stream than the owner.
    streams_.order_after(device_.stream_of(bucket.gradient_stream()), device_.compute_stream(),
                         bucket.reduction.label);
  }
}

// A bucket whose gradients are held or lent gets new memory. Gradients in .grad stay in the old
// memory until the compute stream copies them, and a pending reduction may still write them.
void Reducer::ensure_gradient_memory(Bucket& bucket) {
  const auto is_held = [](const Unit* unit) { return unit->port.has_held_gradients(); };
  const bool is_any_held = std::any_of(bucket.units.begin(), bucket.units.end(), is_held);
  if (!is_any_held && !bucket.has_lent_gradients()) {
    return;
  }
  if (bucket.reduction.is_pending_) {
    device_.compute_stream().wait(*bucket.reduction.reduced_, bucket.reduction.label);
  }
  renew_gradients(bucket);
}

// The compute stream may be another one than the owner of the memory: Note [gradients of several
// streams].
void Reducer::renew_gradients(Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  const bool is_owner = bucket.gradient_stream() == compute.native_handle();
  Stream& owner = is_owner ? compute : device_.stream_of(bucket.gradient_stream());
  const std::shared_ptr<void> memory = bucket.allocate_gradients(device_, owner);
  streams_.order_after(compute, owner, bucket.reduction.label);
  bucket.renew_gradients(memory);
}

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
