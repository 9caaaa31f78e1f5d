// One unit's tensors, and the work of its hooks in autograd's backward.
//
// Note [one pointer swap]
// The unsharded parameters are views of one storage for the life of the unit. attach() points that
// storage at a slot, and detach() at nothing. Every tensor that autograd saved in forward follows,
// such as a transposed weight. While the storage is detached it refuses every access, with an error
// that names the unit. With torch 2.11, which cannot do that, its size is 0: operators that ask for
// a typed pointer or make views raise PyTorch's own errors, but elementwise kernels crash, as they
// do on a storage that FSDP2 has freed. No operator reads stale numbers. Each input of an extension
// (Note [tensor extensions] in fsdp_ext/sharding/params/extensions.py) has a storage of its own.
// attach() points it at the slot, too, and detach() at nothing.
//
// Note [gradients of DTensors]
// For a parameter that tensor parallelism replicates, backward may bring a partial sum. Placing it
// is a collective of the tensor-parallel ranks. So each gradient is placed when it arrives:
// autograd has the same order on these ranks, and their buckets may differ. A user's
// post-accumulate hook replaces ours. Then the gradient is placed when its bucket is reduced, and
// these ranks need the same buckets. FSDP2 places the sum of several backwards, so it may round
// differently.
//
// Note [frozen parameters]
// If a user freezes a parameter, the units are recreated without memory for its gradient. If the
// user unfreezes it, they are recreated with this memory. From then on the parameter `toggles`: it
// keeps the memory, and freezing it recreates nothing. So a GAN may freeze one of two models in
// each step. Forward and backward treat the frozen parameter as frozen. Its bucket is not reduced
// if all parameters in it are frozen. Otherwise zeros are sent in place of its gradient. Flat
// parameters do not toggle.
//
// A parameter may also be frozen after backwards without gradient sync have accumulated gradients
// of it. As in FSDP2 and in a model that is not sharded, the next reduction includes them. The
// units are recreated after it: UnitGradients::awaits_reduction. All ranks of a shard group come to
// the same decision, because they need the same layouts.
//
// Note [double backward]
// A backward with create_graph=True makes a graph that reads the parameters again, and no hook runs
// before these reads. So this backward leaves its units unsharded. They keep their memory, and
// users see the sharded parameters. The next forward that runs a unit gathers it anew. The next
// backward without create_graph reshards a unit when it passes it. But if
// reshard_after_forward=False, it reshards the unit only at its end, because it may read the
// parameters once more.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/units/unit.h"
#include "torch/autograd_hooks.h"
#include "torch/flat_tensor.h"
#include "torch/module_attribute.h"
#include "torch/sharded_gradients.h"
#include "torch/shown_gradients.h"
#include "torch/step_checksum.h"
#include "torch/unit_forward.h"
#include "torch/unit_parameters.h"
#include "torch/with_python.h"

namespace fsdp {

class TorchRoot;

// The unit's memory.
struct UnitTensors {
  FlatTensor shard;          // layout.shard_bytes() bytes, uint8
  at::Tensor flat_gradient;  // moves on to ShardedGradients
  at::Device device;         // of the unsharded parameters
};

class TorchUnit final : public UnitPort, public std::enable_shared_from_this<TorchUnit> {
 public:
  TorchUnit(UnitLayout layout, UnitTensors tensors, std::vector<UnitParameter> parameters,
            ForwardCasts casts, std::size_t module_count);

  // One view for each parameter. The views have memory only while the unit is attached.
  std::vector<at::Tensor> unsharded_views() const;

  // Called once, with the parameters' objects and the module attributes that refer to them.
  // make_gradients(flat_gradient) returns one DTensor for each trainable parameter: its part of the
  // flat gradient. `extensions` is None, or a UnitExtensions. `flat_parameter` is None, or the
  // parameter over the whole flat shard, which has the gradient in place of the sharded parameters:
  // Note [flat parameters] in sharded_gradients.h. make_gradients then returns this gradient alone.
  void bind(std::vector<BoundObjects> objects, pybind11::object make_gradients,
            pybind11::object extensions, pybind11::object flat_parameter,
            std::vector<ModuleAttribute> attributes);
  void join(const std::shared_ptr<TorchRoot>& root, std::string name, int number);

  // - Autograd's hooks: torch/autograd_hooks.h. `call` is the call of forward that made the node.
  void on_pre_backward(CallId call, const torch::autograd::Node* node);
  void on_gradient(std::size_t trainable);
  void on_post_backward(CallId call);
  // Autograd is about to add `gradient` to that of a sharded parameter. Returns true if this call
  // has added it: Note [turns] in torch_root.h.
  bool on_sharded_gradient(std::size_t trainable, const at::Tensor& gradient);

  // Counts gradients that user code has put into the unsharded parameters, as zero-bubble schedules
  // of pipelines do after torch.autograd.grad.
  void adopt_gradients();
  void begin_backward();

  // Restores the users' tensors in .grad: Note [gradients of users] in sharded_gradients.h. With
  // `with_values`, copies the gradients into them first.
  void return_users_gradients(bool with_values = true);
  // Runs users' hooks on the sharded parameters that got a gradient in this backward.
  void run_post_accumulate_hooks();
  // A gradient of the unit's sharded parameters is about to change.
  void before_change_of_gradients();
  // See UnitParameters::has_gradient_setting_changed.
  bool has_gradient_setting_changed(AcceptsFrozen accepts) const {
    return parameters_.has_gradient_setting_changed(accepts, tensors_.shard.flat());
  }
  // Returns the flat gradient for the user: ShardedGradients::share.
  at::Tensor share_flat_gradient();
  // For each parameter of the layout: whether its .grad is a part of the flat gradient.
  std::vector<bool> shows_gradients() const;
  // Changes when shows_gradients() changes, and when the unit makes new gradient tensors.
  std::uint64_t gradients_version() const;
  // Undoes share_memory_() on shards and gradients: see FlatTensor::reclaim.
  void reclaim_memory();
  // The root is destroyed, and the slot with it.
  void leave_root() {
    free_storages();
    shown_.leave_root();
  }

  // The parts of the unit.
  UnitForward& forward() { return forward_; }
  UnitParameters& parameters() { return parameters_; }
  ShardedGradients& gradients() { return gradients_; }
  // Gradients of backwards without gradient sync under FSDP1's wrapper.
  ShownGradients& shown_gradients() { return shown_; }
  UnitChecksum& checksum() { return checksum_; }

  std::shared_ptr<TorchRoot> root() const { return root_.lock(); }  // null if it is destroyed
  const std::string& name() const { return name_; }
  int number() const { return number_; }
  at::Device device() const { return tensors_.device; }

 private:
  // - UnitPort.
  void attach(void* unsharded) override;
  void detach() override;
  void show_sharded() override { parameters_.show(/*unsharded=*/false, name_); }
  void show_unsharded() override { parameters_.show(/*unsharded=*/true, name_); }
  void* flat_shard() override { return tensors_.shard.data(); }
  void* flat_gradient() override { return gradients_.data(); }
  void move_shard(std::shared_ptr<void> memory) override;
  void move_gradient(std::shared_ptr<void> memory) override { gradients_.move(std::move(memory)); }
  std::uint64_t shard_version() override;
  bool computes_inputs() override { return has_extensions_; }
  void compute_inputs() override;
  std::shared_ptr<void> extract_gradients(const void** addresses) override;
  void discard_gradients() override;
  void discard_sharded_gradients() override;
  bool keeps_gradients() override { return shown_.is_enabled(); }
  bool has_held_gradients() override;
  bool uses_gradient_memory() override;
  void set_gradient_memory(std::shared_ptr<void> memory) override {
    gradients_.set_memory(std::move(memory));
  }
  void renew_gradient(std::shared_ptr<void> memory) override {
    gradients_.renew(std::move(memory));
  }
  bool has_sharded_gradient(std::size_t i) override;
  void import_sharded_gradient(std::size_t i) override;
  void set_sharded_gradient(std::size_t i) override;

  // An input of an extension: a part of the slot with a storage of its own. The class may rely on a
  // storage offset of 0, which FSDP2's tensors have.
  struct GatheredInput {
    std::size_t parameter;
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::size_t offset;
    std::size_t bytes;
  };

  void point_storages(void* unsharded);
  void free_storages();
  void attach_extensions();
  void place_gradient(std::size_t parameter);
  void watch_sharded(std::size_t trainable);
  // Of the sharded parameter, or the flat parameter.
  const pybind11::object& gradient_owner_object(std::size_t trainable);
  bool shows_gradient(std::size_t i) const;

  UnitLayout layout_;
  UnitTensors tensors_;
  UnitParameters parameters_;
  ShardedGradients gradients_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<GatheredInput> inputs_;

  HeldObject extensions_;
  bool has_extensions_ = false;
  std::vector<char> got_gradient_;  // in this backward, of each trainable parameter
  ShownGradients shown_;
  UnitForward forward_;
  UnitChecksum checksum_;
  std::weak_ptr<TorchRoot> root_;
  std::string name_;
  std::string pre_backward_range_;  // a range's name, as in UnitForward
  std::string post_backward_range_;
  std::string when_freed_;  // the error of reading an unsharded parameter while detached
  int number_ = -1;
};

// This rank's rows of a DTensor. Takes the GIL.
at::Tensor local_tensor_of(const at::Tensor& dtensor);

// Tells all units that their shards have changed. A hook of every optimizer calls this, because not
// every optimizer changes the versions of the parameters.
void note_optimizer_step();
// From now on, tells only units that the calling thread runs: ranks of one group are threads of
// this process, and the step of one rank must not make another one gather.
void count_optimizer_steps_by_thread();

// Registers `function`, which is called before each move of a shard to other memory. It has to wait
// until nothing reads the old memory any more, because that is freed afterwards.
void call_before_shards_move(pybind11::object function);

// Tells all roots that some module has another parameter or child. The next outermost forward calls
// when_stale. Hooks on registrations and on steps of optimizers call this.
void note_module_change();
std::uint64_t module_changes();

// A number that changes when other gradients lie in the units' flat gradients. A unit that has run
// no forward is null.
std::uint64_t gradients_version_of(const std::vector<std::shared_ptr<TorchUnit>>& units);

}  // namespace fsdp
