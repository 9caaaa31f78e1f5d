// One unit as the schedule sees it: its layout, where its parameters live now, what has arrived
// of its gradients. Whoever owns the tensors implements UnitPort (csrc/torch/unit, and the tests).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/buffer_ring.h"
#include "core/layout.h"
#include "device/stream.h"
#include "pack/pack.h"

namespace fsdp {

class UnitPort {
 public:
  virtual ~UnitPort() = default;

  // The unsharded parameters are at `unsharded` from now on, until detach.
  virtual void attach(void* unsharded) = 0;
  virtual void detach() = 0;

  virtual void* flat_shard() = 0;     // layout.shard_bytes()
  virtual void* flat_gradient() = 0;  // layout.grad_numel() elements of layout.grad_dtype()

  // Changes whenever the sharded parameters are known to have changed.
  virtual std::uint64_t shard_version() = 0;

  // Takes the gradients that have arrived out of the unsharded parameters: their addresses, one
  // for each trainable parameter (nullptr where there is none). What is returned keeps them alive.
  virtual std::shared_ptr<void> take_gradients(const void** addresses) = 0;
  // Of the taken gradients, which is the unsharded parameters'.
  virtual DType gradient_dtype() = 0;
  // Forgets the unsharded parameters' gradients, after a backward that failed.
  virtual void drop_gradients() = 0;

  // Whether trainable parameter i has a sharded gradient already, to which a new one is added.
  // If so, that gradient is in the flat gradient when this returns.
  virtual bool has_sharded_gradient(std::size_t i) = 0;
  // Trainable parameter i's sharded gradient is the flat gradient's part, now or, in the order
  // of the reduce stream, soon.
  virtual void hand_over_gradient(std::size_t i) = 0;
};

struct UnitConfig {
  std::string name;
  UnitLayout layout;
  bool reshard_after_forward = true;
  double pack_scale = 1.0;    // of gradients, before the reduction
  double reduce_scale = 1.0;  // after it
};

// Note [states]
// Sharded -> Gathering (a gather was issued, or a slot with the right contents was taken back)
// -> Unsharded (the compute stream waited; the parameters are attached) -> Sharded. Reducing
// gradients does not touch the parameters, so it is no state: it has its own event.
enum class UnitState : std::uint8_t { Sharded, Gathering, Unsharded };

// Which state of the shards something was made from.
struct ShardStamp {
  std::uint64_t iteration = 0;
  std::uint64_t version = 0;
  bool valid = false;

  bool matches(const ShardStamp& other) const {
    return valid && other.valid && iteration == other.iteration && version == other.version;
  }
};

struct Unit {
  Unit(int unit_number, UnitConfig config, UnitPort& unit_port, Device& device, GatherBy gather_by)
      : number(unit_number),
        name(std::move(config.name)),
        layout(std::move(config.layout)),
        port(unit_port),
        reshard_after_forward(config.reshard_after_forward),
        pack_scale(config.pack_scale),
        reduce_scale(config.reduce_scale),
        cast_plan(layout.shard_to_gather_plan()),
        gather_plan(layout.gather_plan(gather_by)),
        pack_plan(layout.pack_plan()),
        finish_plan(layout.finish_plan()),
        gathered(device.new_event()),
        arrived(pack_plan.entries.size(), 0),
        accumulated_params(pack_plan.entries.size(), 0),
        gradients(pack_plan.entries.size(), nullptr),
        finish_modes(pack_plan.entries.size(), CastMode::Write),
        packed(device.new_event()),
        reduced(device.new_event()),
        gather_label("the all-gather of unit '" + name + "'"),
        reduce_label("the reduce-scatter of unit '" + name + "'") {}

  std::size_t trainable_count() const { return pack_plan.entries.size(); }

  // Of the buffers that belong to this unit alone and exist now.
  std::size_t buffer_bytes() const {
    const std::size_t reduce_input = static_cast<std::size_t>(layout.grad_numel()) *
                                     static_cast<std::size_t>(layout.world_size()) *
                                     itemsize(layout.reduce_dtype());
    return (home != nullptr ? home->bytes : 0) +
           (gather_input != nullptr ? layout.gather_bytes() : 0) +
           (accumulated != nullptr ? reduce_input : 0);
  }

  const int number;
  const std::string name;
  const UnitLayout layout;
  UnitPort& port;

  // - Settings.
  bool reshard_after_forward;
  bool reshard_after_backward = true;
  bool requires_gradient_sync = true;
  double pack_scale;                   // of gradients, before the reduction
  double reduce_scale;                 // after it
  std::vector<int> forward_prefetch;   // empty: the recorded order
  std::vector<int> backward_prefetch;  // empty: the reverse of forward

  // - Descriptors, made once.
  CastPlan cast_plan;
  GatherPlan gather_plan;
  PackPlan pack_plan;
  CastPlan finish_plan;  // reduce output -> flat gradient, by trainable parameter

  // - Parameters.
  UnitState state = UnitState::Sharded;
  bool speculative = false;    // gathering ahead, and nobody has asked for it yet
  Slot* slot = nullptr;        // that holds the parameters: the ring's, or the home
  std::unique_ptr<Slot> home;  // of a unit that stays unsharded after forward
  std::unique_ptr<Event> gathered;
  ShardStamp gathered_from;
  std::uint64_t followed_version = 0;  // of the shards as the gather stream may read them
  std::shared_ptr<void> gather_input;  // only where the wire has another dtype than the shard
  ShardStamp cast_from;
  int last_forward_call = -1;

  // Note [reentrant checkpointing]
  // A forward call without gradients inside a forward with gradients is one that reentrant
  // checkpointing will run again in backward, where each such run brings gradients of its own.
  // The reduction waits for the last of them.
  int calls_to_recompute = 0;      // of forwards that have ended, since the last backward
  int calls_without_gradient = 0;  // of the forward that runs
  int recomputations = 0;          // in this backward

  // - Gradients. The vectors have one element for each trainable parameter.
  std::vector<char> arrived;  // in this backward, and not yet packed
  std::size_t arrived_count = 0;
  std::shared_ptr<void> accumulated;  // reduce input that outlives a backward without sync
  std::vector<char> accumulated_params;
  bool has_accumulated = false;
  std::vector<const void*> gradients;  // addresses of those taken for the packer
  std::vector<CastMode> finish_modes;  // of finish_plan's entries
  std::unique_ptr<Event> packed;
  std::unique_ptr<Event> reduced;
  bool reduction_pending = false;  // the compute stream has not waited for `reduced` yet

  // - What waits are for, in error messages.
  const std::string gather_label;
  const std::string reduce_label;
};

}  // namespace fsdp
