// One unit's tensors: the flat shard and its gradient, the unsharded parameters as views of one
// storage, the modules' attributes, and the hooks that forward and backward call.
//
// Note [one pointer swap]
// The unsharded parameters are views of one storage for the life of the unit. Attaching points
// that storage at a slot, detaching at nothing. Whatever autograd saved in forward (also views of
// views, a transposed weight, say) follows. Reading it while detached raises PyTorch's own "data is
// not allocated yet" in operators that ask for a typed pointer, matrix products above all;
// elementwise kernels do not look and crash, as they do on a storage that FSDP2 has freed. Nothing
// gives stale numbers.
//
// Note [registered parameters]
// While a unit is unsharded its modules have the unsharded parameters as attributes, else the
// sharded DTensors. Swapping them is a PyDict_SetItem each and needs the GIL; it runs no Python.
// Backward swaps, too: checkpointed parts of a unit's forward run again there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/unit.h"
#include "torch/autograd_hooks.h"

namespace fsdp {

class TorchRoot;

struct ModuleAttribute {
  pybind11::dict parameters;  // module._parameters
  pybind11::str name;
  std::size_t parameter;  // index in the unit
};

// Memory, and what the unsharded parameters look like.
struct UnitTensors {
  at::Tensor flat_shard;     // layout.shard_bytes() bytes, uint8
  at::Tensor flat_gradient;  // layout.grad_numel() elements of layout.grad_dtype()
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<at::ScalarType> param_dtypes;
};

// What a unit's forward casts floating-point tensors to, if anything.
struct ForwardCasts {
  std::optional<at::ScalarType> inputs;
  std::optional<at::ScalarType> outputs;
};

class TorchUnit final : public UnitPort,
                        public BackwardTarget,
                        public std::enable_shared_from_this<TorchUnit> {
 public:
  TorchUnit(UnitLayout layout, UnitTensors tensors, ForwardCasts casts, std::size_t module_count);
  ~TorchUnit() override;

  // Views of the storage that attach points somewhere, one for each parameter.
  std::vector<at::Tensor> unsharded_views() const;

  // The parameters on both sides and where modules have them. `gradients` are the sharded
  // gradients of the trainable ones, DTensors over the flat gradient.
  void bind(pybind11::list sharded, pybind11::list unsharded, pybind11::list gradients,
            std::vector<ModuleAttribute> attributes);
  void join(const std::shared_ptr<TorchRoot>& root, std::string name, int number);

  // - Module hooks.
  // `index` is the module's in the unit. They return None where nothing is to change, else
  // (args, kwargs) and the output.
  pybind11::object pre_forward(std::size_t index, pybind11::handle module, pybind11::handle args,
                               pybind11::handle kwargs);
  pybind11::object post_forward(std::size_t index, pybind11::handle output);

  // - UnitPort.
  void attach(void* unsharded) override;
  void detach() override;
  void* flat_shard() override { return tensors_.flat_shard.data_ptr(); }
  void* flat_gradient() override { return tensors_.flat_gradient.data_ptr(); }
  void move_shard(std::shared_ptr<void> memory) override {
    move(tensors_.flat_shard, std::move(memory));
  }
  void move_gradient(std::shared_ptr<void> memory) override {
    move(tensors_.flat_gradient, std::move(memory));
  }
  std::uint64_t shard_version() override;
  std::shared_ptr<void> extract_gradients(const void** addresses) override;
  void drop_gradients() override;
  bool has_sharded_gradient(std::size_t i) override;
  void import_sharded_gradient(std::size_t i) override;
  void set_sharded_gradient(std::size_t i) override;

  // - BackwardTarget.
  void on_pre_backward(int forward_call) override;
  void on_gradient(std::size_t trainable) override;
  void on_post_backward() override;

  // Runs the hooks that users registered on sharded parameters whose gradients were handed over.
  void run_post_accumulate_hooks();
  // Whether parameters were frozen or unfrozen since the unit was made.
  bool trainable_set_changed() const;
  // A forward that leaves modules of a group out: forgets which are still to run.
  bool is_incomplete() const { return pending_count_ > 0 && pending_count_ < pending_.size(); }
  void forget_pending();
  void watch_outputs(pybind11::handle output, int forward_call);

  const UnitLayout& layout() const { return layout_; }
  int number() const { return number_; }

 private:
  at::Device device() const { return tensors_.flat_shard.device(); }
  const at::Tensor& sharded(std::size_t parameter) const;
  static void move(const at::Tensor& flat, std::shared_ptr<void> memory);
  void register_parameters(bool unsharded);
  bool enter_module();
  bool leave_module(std::size_t index);
  pybind11::object cast(pybind11::handle object, std::optional<at::ScalarType> dtype) const;
  pybind11::object watch_inputs(pybind11::handle inputs);

  UnitLayout layout_;
  UnitTensors tensors_;
  ForwardCasts casts_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;

  std::vector<pybind11::object> sharded_;
  std::vector<at::Tensor> unsharded_;
  std::vector<pybind11::object> unsharded_objects_;
  std::vector<std::size_t> trainable_;  // parameter of each trainable index
  std::vector<at::Tensor> gradients_;   // sharded, of each trainable index
  std::vector<char> handed_over_;       // in this backward
  std::vector<ModuleAttribute> attributes_;
  bool unsharded_registered_ = false;

  std::vector<char> pending_;  // modules of a group that forward has not run yet
  std::size_t pending_count_ = 0;

  std::weak_ptr<TorchRoot> root_;
  std::string name_;
  int number_ = -1;
};

// Called by an optimizer's step, which leaves no trace on the parameters' versions.
void note_optimizer_step();

}  // namespace fsdp
