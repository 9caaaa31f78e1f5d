// The memory of the reducer: reduce input and output, and that of the sharded gradients.
#include <algorithm>
#include <vector>

#include "base/align.h"
#include "core/reduce/reducer.h"

namespace fsdp {

void Reducer::synchronize() {
  lane_.synchronize();
  if (replicas_ != nullptr) {
    replicas_->synchronize();
  }
}

void Reducer::plan_memory(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  synchronize();
  const bool has_replicas = replicas_ != nullptr;
  updated_.clear();  // it may name buckets that no longer exist
  input_.reset(nullptr, 0);
  output_.reset(nullptr, 0);
  const bool has_peers = lane_.communicator().size() > 1;
  const bool may_differ = has_several_meshes(buckets);
  const auto plan = [&](bool in_pieces_elsewhere) {
    return plan_reductions(uses_of(buckets), !device_.is_host() && has_peers, has_replicas,
                           in_pieces_elsewhere);
  };
  ReduceMemory memory = plan(false);
  memory = plan(lane_.most(memory.any_in_pieces ? 1 : 0, may_differ) > 0);
  memory.input_bytes = lane_.most(memory.input_bytes, may_differ);
  memory.output_bytes = lane_.most(memory.output_bytes, may_differ);
  streams_.set_any_in_pieces(memory.any_in_pieces);
  packs_ahead_ = memory.packs_ahead;
  packed_gradients_.set_limit(memory.most_gradients);
  if (packs_ahead_) {
    lane_.make_copy_streams();
  }
  const std::size_t input = memory.input_bytes;
  input_.reset(input > 0 ? lane_.allocate(input, BufferUse::Input) : nullptr, input);
  output_bytes_ = memory.output_bytes;
  const auto always_needs_output = [this](const auto& bucket) {
    return route_of(*bucket) != Route::Local && bucket->layout.trainable_count() > 0 &&
           !reduces_in_place(bucket->layout, bucket->units.front()->post_scale);
  };
  const bool needs_output =
      std::any_of(buckets.begin(), buckets.end(), always_needs_output) ||
      ((has_peers || has_replicas) && lane_.communicator().traits().keeps_reduce_output);
  if (output_bytes_ > 0 && lane_.most(needs_output ? 1 : 0, may_differ) > 0) {
    output_.reset(lane_.allocate(output_bytes_, output_use()), output_bytes_);
  }
  place_gradients(buckets);
  const std::shared_ptr<void> marks = nonfinite_.place(buckets);
  // Forming buckets and planning memory copy shards, gradients and marks on this stream. The old
  // memory may belong to another stream, which could reuse it at once.
  device_.compute_stream().synchronize();
}

// Makes the output at least `bytes` large. The planned size always has room for messages. Before
// the output grows, work in flight ends, because it may use the old one.
void Reducer::prepare_output(std::size_t bytes) {
  if (output_.data() != nullptr && output_.bytes() >= bytes) {
    return;
  }
  if (output_.data() != nullptr) {
    synchronize();
  }
  output_bytes_ = std::max(output_bytes_, align_up(bytes, 2 * kRegionAlignment));
  output_.reset(nullptr, 0);
  output_.reset(lane_.allocate_alone(output_bytes_, output_use()), output_bytes_);
}

// - Sharded gradients

// See Note [shards and gradients in windows].
void Reducer::place_gradients(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  std::vector<Lane::Movable> gradients;
  for (const auto& bucket : buckets) {
    // With any scale, because the scale may change before memory is planned again.
    if (lane_.registers_gradients() && bucket->mesh == nullptr && bucket->gradient_bytes() > 0 &&
        reduces_in_place(bucket->layout, /*post_scale=*/1.0)) {
      gradients.push_back({bucket->flat_gradient(), bucket->gradient_bytes(),
                           [&bucket = *bucket](auto memory) { bucket.move_gradients(memory); }});
    }
  }
  lane_.place_in_windows(gradients, BufferUse::Gradient);
  for (const auto& bucket : buckets) {
    bucket->reduction.into_window_ =
        bucket->mesh == nullptr && lane_.is_registered(bucket->flat_gradient());
  }
}

// See Note [lent gradients].
void Reducer::lend_gradients(const std::vector<std::unique_ptr<Bucket>>& buckets) {
  if (device_.is_host() || device_.is_capturing()) {
    return;
  }
  for (const auto& bucket : buckets) {
    if (may_lend(*bucket)) {
      lend(*bucket);
    }
  }
}

bool Reducer::may_lend(const Bucket& bucket) {
  const BucketReduction& reduction = bucket.reduction;
  return !bucket.layout.is_offloaded() && !reduction.is_pending_ && !reduction.into_window_ &&
         bucket.gradient_bytes() > 0 && !bucket.has_lent_gradients() &&
         !bucket.uses_gradient_memory() &&
         std::none_of(bucket.units.begin(), bucket.units.end(),
                      [](const Unit* unit) { return unit->updates.is_awaited; });
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
  }
}

// Allocates if the user holds gradients of the bucket, or if they are lent. Gradients may be copied
// from the old memory, so a pending reduction is waited for.
void Reducer::ensure_gradient_memory(Bucket& bucket) {
  const auto is_held = [](const Unit* unit) { return unit->port.has_held_gradients(); };
  const bool is_any_held = std::any_of(bucket.units.begin(), bucket.units.end(), is_held);
  if (!is_any_held && !bucket.has_lent_gradients()) {
    return;
  }
  if (is_any_held && !may_lend_) {
    refuse_after_capture();
  }
  wait_before_change(bucket);
  renew_gradients(bucket);
}

// The compute stream copies gradients from the old memory to the new memory, whose padding it fills
// with zeros. Both may belong to another stream, their owner: Note [gradients of several streams].
void Reducer::renew_gradients(Bucket& bucket) {
  Stream& compute = device_.compute_stream();
  const bool is_owner = bucket.gradient_stream() == compute.native_handle();
  Stream& owner = is_owner ? compute : device_.stream_of(bucket.gradient_stream());
  const std::shared_ptr<void> memory = bucket.allocate_gradients(device_, owner);
  streams_.order_after(compute, owner, bucket.reduction.label);
  bucket.renew_gradients(memory);
  streams_.order_after(owner, compute, bucket.reduction.label);
}

}  // namespace fsdp
