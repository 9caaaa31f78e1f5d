// The interface that the owner of a unit's tensors implements for the schedule:
// csrc/torch/torch_unit, and the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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
  virtual void* flat_gradient() = 0;  // layout.gradient_bytes(), or null: Note [lent gradients]

  // Copies the content, if there is any, into `memory`, where it stays from now on: Note [moving
  // shards].
  virtual void move_shard(std::shared_ptr<void> memory) = 0;
  virtual void move_gradient(std::shared_ptr<void> memory) = 0;

  // Changes whenever code outside the schedule is known to have changed the sharded parameters.
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
  virtual void discard_gradients() = 0;

  // Whether backwards without gradient sync leave their gradients in the unsharded parameters,
  // where the port finds them afterwards. Otherwise they are packed.
  virtual bool keeps_gradients() { return false; }

  // Whether a user still holds a sharded gradient that is no longer in .grad. Without new memory
  // (renew_gradient), the next reduction would overwrite the user's tensor.
  virtual bool has_held_gradients() = 0;
  // Makes new sharded gradients in `memory`. Their values are undefined. Holders of the old ones
  // keep the old memory.
  virtual void renew_gradient(std::shared_ptr<void> memory) = 0;

  // Whether a sharded gradient is in .grad, or user code may hold one or the flat gradient.
  virtual bool uses_gradient_memory() = 0;
  // Gives the sharded gradients this memory, with undefined values. Null lends their memory.
  virtual void set_gradient_memory(std::shared_ptr<void> memory) = 0;

  // Whether trainable parameter i has a sharded gradient, to which a new one is added.
  virtual bool has_sharded_gradient(std::size_t i) = 0;
  // Copies that gradient into the flat gradient, unless it is there already.
  virtual void import_sharded_gradient(std::size_t i) = 0;
  // Removes the sharded gradients of the unit, after a backward that failed before their update.
  virtual void discard_sharded_gradients() = 0;
  // Makes a part of the flat gradient the sharded gradient of trainable parameter i. The reduce
  // stream writes its values.
  virtual void set_sharded_gradient(std::size_t i) = 0;
};

}  // namespace fsdp
