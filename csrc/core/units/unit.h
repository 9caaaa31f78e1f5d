// One unit as the schedule sees it: its layout, its settings, and which gradients have arrived.
// Collectives carry its whole bucket (core/units/bucket.h). The owner of the tensors implements
// UnitPort (csrc/torch/torch_unit, and the tests).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/memory/buffer_ring.h"
#include "core/record/ledger.h"
#include "core/schedule/backward_order.h"
#include "core/schedule/call_id.h"
#include "core/units/unit_config.h"
#include "device/stream.h"

namespace fsdp {

class UnitPort {
 public:
  virtual ~UnitPort() = default;

  // The unsharded parameters are at `unsharded` until detach.
  virtual void attach(void* unsharded) = 0;
  virtual void detach() = 0;
  // Users see the sharded parameters from now on, although the unsharded ones stay attached.
  virtual void show_sharded() = 0;
  virtual void show_unsharded() = 0;  // as after attach

  virtual void* flat_shard() = 0;     // layout.shard_bytes()
  virtual void* flat_gradient() = 0;  // layout.gradient_bytes()

  // Copies the content into `memory`, where it stays from now on: Note [moving shards].
  virtual void move_shard(std::shared_ptr<void> memory) = 0;
  virtual void move_gradient(std::shared_ptr<void> memory) = 0;

  // Changes whenever the sharded parameters are known to have changed.
  virtual std::uint64_t shard_version() = 0;

  // Whether parts of the flat shard are computed from sharded parameters that lie elsewhere: Note
  // [tensor extensions] in fsdp_ext/sharding/params/extensions.py. If so, compute_inputs() writes
  // these parts.
  virtual bool computes_inputs() { return false; }
  virtual void compute_inputs() {}

  // Moves the gradients out of the unsharded parameters. Writes their addresses, one for each
  // trainable parameter (nullptr if it has none). The result keeps them alive.
  virtual std::shared_ptr<void> extract_gradients(const void** addresses) = 0;
  // Drops the unsharded parameters' gradients, after a backward that failed.
  virtual void drop_gradients() = 0;

  // Whether backwards without gradient sync leave their gradients in the unsharded parameters,
  // where the port finds them afterwards. Otherwise they are packed.
  virtual bool keeps_gradients() { return false; }

  // Whether a user still holds a sharded gradient that its parameter has no more. The next
  // reduction would overwrite it.
  virtual bool has_held_gradients() = 0;
  // Makes new sharded gradients in `memory`. Their values are undefined. Holders of the old ones
  // keep the old memory.
  virtual void renew_gradient(std::shared_ptr<void> memory) = 0;

  // Whether trainable parameter i has a sharded gradient, to which a new one is added.
  virtual bool has_sharded_gradient(std::size_t i) = 0;
  // Copies that gradient into the flat gradient, unless it is there already.
  virtual void import_sharded_gradient(std::size_t i) = 0;
  // Makes a part of the flat gradient the sharded gradient of trainable parameter i. The reduce
  // stream writes its values.
  virtual void set_sharded_gradient(std::size_t i) = 0;
};

// Note [states]
// Sharded -> Gathering (a gather was issued, or a slot with current contents was reacquired) ->
// Unsharded (the compute stream waited and the parameters are attached) -> Sharded. A gather covers
// a whole bucket. Each of its units is resharded by itself, and the last one releases the slot.
// Reducing gradients does not touch the parameters, so it is not a state. It has its own event.
//
// Note [after an evaluation]
// A user may write into the parameters that the modules have, or give them to an optimizer. Between
// steps these have to be the sharded ones. So a forward without gradients reshards all units, even
// those that stay unsharded if a backward follows. If the user asked for
// reshard_after_forward=False, the unit keeps its slot for the next evaluation, but it is put away:
// users see its sharded parameters. After an exception every unit is put away. A unit that the user
// has unsharded with unshard() stays as it is.
enum class UnitState : std::uint8_t { Sharded, Gathering, Unsharded };

struct Bucket;

// Larger than the number of any packing.
constexpr std::uint64_t kNoPacking = ~std::uint64_t{0};

// A unit with its settings, which may change, and its state.
struct Unit : UnitConfig {
  Unit(int unit_number, UnitConfig config, UnitPort& unit_port)
      : UnitConfig(std::move(config)),
        number(unit_number),
        port(unit_port),
        arrived(layout.trainable_count(), 0),
        used(layout.trainable_count(), 0),
        reduced_since(layout.trainable_count(), kNoPacking) {}

  const int number;
  UnitPort& port;

  // - Place in the bucket.
  Bucket* bucket = nullptr;
  std::size_t position = 0;          // among the bucket's units
  std::size_t unsharded_offset = 0;  // bytes, in the bucket's unsharded buffer
  std::size_t first_trainable = 0;   // index among the bucket's trainable parameters
  std::size_t gradient_offset = 0;   // elements, in the bucket's segments

  // - Parameters.
  UnitState state = UnitState::Sharded;
  bool is_speculative = false;         // prefetched and not used yet
  bool is_put_away = false;            // unsharded, but users see the sharded parameters
  bool is_held = false;                // unsharded by the user, not by a forward
  Slot* slot = nullptr;                // of the bucket, while this unit uses it
  std::uint64_t gathered_version = 0;  // of its shards, when the bucket was gathered last
  std::uint64_t followed_version = 0;  // of its shards, as the gather stream may read them
  std::uint64_t inputs_iteration = 0;  // the gatherer's, when the port computed inputs last
  std::uint64_t inputs_version = 0;    // of its shards, at that time
  CallId entering = kNoCall;           // the call that runs in forward
  IterationIndex computing;            // the span of its forward or backward

  // - The steps that this backward has not taken: Note [order of backward].
  int gathers_left = 0;
  int passes_left = 0;
  int recomputations_left = 0;  // whose second run has not begun
  // The backwards inside backward that bring gradients: Note [reentrant checkpointing].
  int gradient_sources = 0;
  bool is_recomputed = false;  // as a whole, in a region of reentrant checkpointing

  // - Gradients.
  bool sends_zeros = false;   // this backward has reached the unit, on all ranks
  std::vector<char> arrived;  // in this backward and not packed yet, by trainable parameter
  std::size_t arrived_count = 0;
  std::vector<char> used;   // of each trainable parameter: reduced a gradient of this rank
  bool is_reduced = false;  // in this backward
  // Whether backwards without gradient sync have reached the unit since its last reduction. It is
  // the same on all ranks.
  bool awaits_reduction = false;
  // Note [NaN and Inf] in core/reduce/nonfinite_gradients.h.
  std::uint64_t* nonfinite_marks = nullptr;  // on the device
  std::vector<std::uint64_t> reduced_since;  // the first packing in the last reduction

  void begin_backward() {
    gathers_left = passes_left = recomputations_left = gradient_sources = 0;
    sends_zeros = is_reduced = is_recomputed = false;
    std::fill(used.begin(), used.end(), 0);
  }

  void count_step(BackwardAction action) {
    gathers_left += action == BackwardAction::Gather ? 1 : 0;
    passes_left += action == BackwardAction::Pass ? 1 : 0;
    recomputations_left += action == BackwardAction::Recompute ? 1 : 0;
    is_recomputed = recomputations_left > 0;
    // All calls that forward recorded share one.
    gradient_sources = recomputations_left + (passes_left > 0 ? 1 : 0);
  }

  // A backward inside backward has brought a gradient. If the reentrant regions are inside the
  // unit, each of its calls has such backwards.
  void note_inner_gradient() {
    if (!is_recomputed) {
      gradient_sources = std::max(gradient_sources, 2);
    }
  }

  // See Note [after an evaluation].
  void put_away() {
    if (state == UnitState::Unsharded && !is_put_away && !is_held) {
      is_put_away = true;
      port.show_sharded();
    }
  }

  bool needs_reduction() const {
    return arrived_count > 0 ||
           (sends_zeros && requires_gradient_sync && !is_reduced && !arrived.empty());
  }

  // Whether this backward has reached the unit and leaves its gradients unreduced. It is the same
  // on all ranks.
  bool leaves_gradients() const {
    return sends_zeros && !requires_gradient_sync && !arrived.empty();
  }

  // No gradient arrives any more in this backward: Note [order of reductions].
  bool is_complete() const {
    const bool has_all = arrived_count == arrived.size() && gathers_left == 0;
    return recomputations_left == 0 && (passes_left == 0 || (has_all && gradient_sources <= 1));
  }
};

}  // namespace fsdp
