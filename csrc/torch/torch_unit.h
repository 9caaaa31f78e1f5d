// A unit's tensors, its modules' attributes, and the hooks that forward and backward call.
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
// Note [registered parameters]
// While a unit is unsharded, its modules have the unsharded parameters as attributes, and otherwise
// the sharded DTensors. (Note [after an evaluation] in core/gather/unit_gather.h has an exception.)
// Each swap is one PyDict_SetItem, which needs the GIL but runs no Python, unless the module has a
// __setattr__ of its own: torch/module_attribute.h. Backward swaps, too, since activation
// checkpointing runs parts of forward again.
//
// Note [opaque outputs]
// Backward gathers a unit when it reaches a tensor that the unit's forward returned. A hook cannot
// see tensors inside a generator, or inside an object of a user's class, so nothing would gather
// the unit. Such a unit stays unsharded until backward has ended. A generator even runs its module
// after the hook, when the parameters would be sharded.
//
// Note [gradients of DTensors]
// Backward may bring partial sums for a parameter that tensor parallelism replicates, and placing
// them is a collective. So they are placed when they arrive, in the order of autograd, which is the
// same on all ranks that take part. Their buckets need not be the same. FSDP2 places the sum of
// several backwards, so it may round differently.
//
// Note [frozen while gradients accumulate]
// A parameter may be frozen while backwards without gradient sync have accumulated gradients of it.
// As in FSDP2 and in a model that is not sharded, the next reduction includes them. So it stays in
// the unit's layout as a trained parameter, but forward and backward see a frozen one. The unit is
// made anew after that reduction. UnitGradients::awaits_reduction decides this. Its result is the
// same on all ranks, because their layouts have to be the same.
//
// Note [double backward]
// A backward with create_graph=True makes a graph that reads the parameters again, and no hook runs
// before that. So this backward does not reshard the units that it passes. The next backward
// without create_graph, or the next forward after an optimizer's step, reshards them. That backward
// may itself read the parameters again, after it has passed their unit. So it reshards units with
// reshard_after_forward=False only at its end. Forwards in between reshard all others. Until then
// users see the sharded parameters if this backward has given them gradients.
//
// Note [units of one module]
// The parameters of one fully_shard call may lie on several meshes. Each mesh then has its own
// unit, and these units share the modules. The first unit encloses the second, and so on. The
// modules have the hooks of the first unit only. So forward, backward and the schedule treat these
// units as units of nested modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
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

// The dtypes to which forward casts floating-point inputs and outputs, if any.
struct ForwardCasts {
  std::optional<at::ScalarType> inputs;
  std::optional<at::ScalarType> outputs;
};

// The names of a unit's ranges in profilers' timelines, as FSDP2's.
struct UnitRanges {
  explicit UnitRanges(const std::string& unit)
      : pre_forward(range_name("pre_forward", unit)),
        post_forward(range_name("post_forward", unit)),
        pre_backward(range_name("pre_backward", unit)),
        post_backward(range_name("post_backward", unit)) {}

  std::string pre_forward;
  std::string post_forward;
  std::string pre_backward;
  std::string post_backward;
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
  // From now on this unit's hooks run those of `inner`, too: Note [units of one module].
  void enclose(std::shared_ptr<TorchUnit> inner) { inner_ = std::move(inner); }

  // - Module hooks.
  // `index` is the module's place in the unit. They return None to change nothing. Otherwise
  // pre_forward returns new (args, kwargs), and post_forward a new output. If forward raises, torch
  // calls post_forward while it handles the exception.
  pybind11::object pre_forward(std::size_t index, pybind11::handle module, pybind11::handle args,
                               pybind11::handle kwargs);
  pybind11::object post_forward(std::size_t index, pybind11::handle output);
  // Take part in the unit's collectives without running its module `index`. begin_skip returns an
  // alias of the tensor. Backward joins the reduction when it passes this alias, and sends zeros.
  at::Tensor begin_skip(const at::Tensor& tensor);
  void end_skip(std::size_t index, const at::Tensor& tensor);

  // - Autograd's hooks: torch/autograd_hooks.h. `call` is the call of forward that made the node.
  void on_pre_backward(CallId call, const torch::autograd::Node* node);
  void on_gradient(std::size_t trainable);
  void on_post_backward(CallId call);

  // Counts gradients that user code has put into the unsharded parameters, as zero-bubble schedules
  // of pipelines do after torch.autograd.grad.
  void adopt_gradients();
  // Gradients of backwards without gradient sync under FSDP1's wrapper.
  ShownGradients& shown_gradients() { return shown_; }
  void check_shown_gradients() const { shown_.check(name_); }
  void begin_backward();

  // Runs users' hooks on the sharded parameters that got a gradient in this backward.
  void run_post_accumulate_hooks();
  // Freezes and unfreezes sharded parameters as the user did with the unsharded ones, and vice
  // versa.
  void carry_gradient_settings();
  // Returns the flat gradient for the user: ShardedGradients::share.
  at::Tensor share_flat_gradient();
  // For each parameter of the layout: whether its .grad is a part of the flat gradient.
  std::vector<bool> shows_gradients() const;
  // Changes when shows_gradients() changes, and when the unit makes new gradient tensors.
  std::uint64_t gradients_version() const;
  // Whether a parameter was frozen, unfrozen or given a grad_dtype since the unit was made, or the
  // flat parameter was given other memory, so that the unit has to be made anew.
  bool has_gradient_setting_changed(bool awaits_reduction) const;
  // Enclose a checked step: Note [checked steps] in torch/step_checksum.h.
  void begin_checksum();
  StepChecksum::Numbers end_checksum();
  void discard_checksum() { checksum_.reset(); }
  // Undoes share_memory_() on shards and gradients: see FlatTensor::reclaim.
  void reclaim_memory();
  // The root is destroyed, and the slot with it.
  void leave_root() {
    free_storages();
    shown_.leave_root();
  }
  // The outermost forward has returned `output`. If it has run only some modules of the group,
  // nothing else ends the unit's forward.
  void end_incomplete_forward(TorchRoot& root, pybind11::handle output);
  // Forgets which modules of a group forward has run.
  void reset_pending();

  const UnitLayout& layout() const { return layout_; }
  at::Device device() const { return tensors_.device; }
  ShardedGradients& gradients() { return gradients_; }
  int number() const { return number_; }

 private:
  // - UnitPort.
  void attach(void* unsharded) override;
  void detach() override;
  void show_sharded() override { register_parameters(/*unsharded=*/false); }
  void show_unsharded() override { register_parameters(/*unsharded=*/true); }
  void* flat_shard() override { return tensors_.shard.data(); }
  void* flat_gradient() override { return gradients_.data(); }
  void move_shard(std::shared_ptr<void> memory) override { tensors_.shard.move(std::move(memory)); }
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
  void register_parameters(bool unsharded);
  void take_gradient_settings();  // from the sharded parameters: see carry_gradient_settings
  void attach_extensions();
  void place_gradient(std::size_t parameter);
  bool shows_gradient(std::size_t i) const;
  pybind11::object end_forwards(TorchRoot& root, std::size_t index, pybind11::handle returned);
  pybind11::object end_forward(TorchRoot& root, std::size_t index, pybind11::handle returned);
  void discard_watches(std::size_t index);
  void hash_parameters();
  at::Tensor hash_of_shard() const;
  std::uint64_t shard_version_of_schedule() const;  // with updates in backward
  bool is_summoned(TorchRoot& root) const;
  bool enter_module();
  bool leave_module(std::size_t index);
  pybind11::object cast(pybind11::handle object, std::optional<at::ScalarType> dtype) const;
  std::shared_ptr<TorchUnit> kept_unit();
  void watch_inputs(std::size_t index, pybind11::handle inputs, CallId call, bool entering);
  pybind11::object end_watch(std::size_t index, pybind11::handle output, CallId call,
                             GraphCalls* calls);
  // Returns whether a tensor in `output` requires a gradient.
  bool watch_outputs(pybind11::handle output, CallId call, GraphCalls* calls);
  void keep_for_opaque(TorchRoot& root, CallId call, pybind11::handle output);

  UnitLayout layout_;
  UnitTensors tensors_;
  UnitParameters parameters_;
  ShardedGradients gradients_;
  ForwardCasts casts_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<GatheredInput> inputs_;

  HeldObject extensions_;
  bool has_extensions_ = false;
  std::vector<char> got_gradient_;  // in this backward, of each trainable parameter
  ShownGradients shown_;
  std::vector<ModuleAttribute> attributes_;
  bool unsharded_registered_ = false;
  std::unique_ptr<StepChecksum> checksum_;  // in a checked step only

  // The exception that was being handled when forward entered each module. Not owned.
  std::vector<const PyObject*> handled_;
  std::vector<InputWatch> watches_;  // of each module whose forward runs
  std::vector<char> pending_;        // modules of a group that forward has not run yet
  std::size_t pending_count_ = 0;
  std::uint64_t first_node_ = 0;  // of the current call: add_pre_backward_hook
  // As in FSDP2, the outermost unit moves a batch from the host to the GPU. Checkpointing may run
  // this unit's forward again, which then moves the same inputs.
  bool moves_inputs_ = false;
  bool has_warned_ = false;  // of an opaque output

  std::weak_ptr<TorchRoot> root_;
  std::shared_ptr<TorchUnit> inner_;  // may be null
  std::string name_;
  UnitRanges ranges_{/*unit=*/""};
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

// Tells all roots that some module has another parameter or child. The next outermost forward calls
// when_stale. A hook on registrations calls this.
void note_module_change();
std::uint64_t module_changes();

}  // namespace fsdp
