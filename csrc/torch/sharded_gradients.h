// A unit's flat gradient, and the sharded gradients in it: DTensors, one for each trainable
// parameter.
//
// Note [held gradients]
// The sharded gradients are the same tensors in every step, parts of the flat gradient. A user may
// hold one after zero_grad(), or its local tensor, or a view of it. Then the values in it must not
// change. So before each reduction, references to gradients no longer in .grad are counted. If
// there are more than the unit's own, user code holds the gradient. The holders keep the memory,
// and the units of the bucket get a new flat gradient. If the user has asked for the flat gradient
// of a unit, nothing is counted.
//
// Note [gradients of users]
// A user may put another tensor into .grad before backward: one of their own, or an older gradient
// that they hold. The reduction has to add to its values. So it first copies them into the flat
// gradient, and puts the gradient that lies there into .grad. The end of backward copies the result
// into the user's tensor and puts that back into .grad, as if backward had added to it in place.
// After a backward that fails, .grad has the user's tensor with its old values.
//
// Note [flat parameters]
// FSDP1 with use_orig_params=False shows one flat parameter for each unit. Its gradient is the
// whole flat gradient, as one plain tensor in place of the DTensors. Optimizers and norms take all
// elements, so each reduction writes zeros into the padding.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "torch/flat_tensor.h"
#include "torch/with_python.h"

namespace fsdp {

class ShardedGradients {
 public:
  // `flat` has layout.gradient_bytes().
  explicit ShardedGradients(at::Tensor flat) : flat_(std::move(flat), {}) {}

  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  // Called once. `make` returns a list of `count` tensors over the flat gradient that it is called
  // with: DTensors, or the plain one of a flat parameter.
  void bind(pybind11::object make, std::size_t count, bool is_of_flat_parameter);

  std::size_t count() const { return count_; }
  const at::Tensor& at(std::size_t i) const { return gradients_[i].tensor; }
  void* data() const { return flat_.data(); }

  // Whether gradient i, which is not in .grad, has other holders than the unit. It runs without the
  // GIL, and reads numbers that only users' threads change.
  bool is_held(std::size_t i) const;
  bool is_released() const { return gradients_.empty(); }
  bool is_shared() const { return is_shared_; }

  // Implements UnitPort::move_gradient.
  void move(std::shared_ptr<void> memory);
  // Implements UnitPort::renew_gradient. Takes the GIL.
  void renew(std::shared_ptr<void> memory);
  // Implements UnitPort::set_gradient_memory. It makes no new tensors.
  void set_memory(std::shared_ptr<void> memory);
  // A tensor of the user's, and the number of its gradient.
  using Import = std::pair<std::size_t, at::Tensor>;
  // `shown` is the tensor in .grad. Copies its values into gradient i, replaces it by that, and
  // keeps the old tensor if a user has it: Note [gradients of users]. Takes the GIL.
  void import(std::size_t i, at::Tensor& shown);
  // Returns the tensors that import() has kept, and drops them.
  std::vector<Import> take_imports() { return std::exchange(imports_, {}); }
  // Copies gradient i into a tensor of the user's. Takes the GIL.
  void copy_to(const at::Tensor& gradient, std::size_t i) const;
  // Undoes share_memory_(): FlatTensor::reclaim.
  void reclaim() { flat_.reclaim(); }

  // Drops the gradients, except those in .grad of a parameter. The next reduction makes new ones.
  void release() {
    gradients_.clear();
    version_ = next_version();
  }
  // Changes whenever the gradients are other tensors than before. No two units share a version,
  // except before their first change.
  std::uint64_t version() const { return version_; }
  const at::Tensor& flat() const { return flat_.flat(); }
  // Returns the flat gradient. From now on the caller follows it when it moves:
  // Note [held gradients].
  at::Tensor share();

 private:
  struct Gradient {
    // References to the DTensor and its local tensor together. References to the storage are
    // counted separately: the flat tensor refers to the storages of present gradients only.
    std::size_t references() const;
    const at::Tensor& rows() const;

    at::Tensor tensor;
    HeldObject object;
    HeldObject local;
    // While its parameter does not have it.
    std::size_t own_references = 0;
    std::size_t own_references_of_storage = 0;
  };

  static std::uint64_t next_version();
  void make();
  void clear_padding();

  FlatTensor flat_;
  std::size_t count_ = 0;
  HeldObject make_;
  std::vector<Gradient> gradients_;  // empty after release
  std::vector<Import> imports_;      // empty between backwards
  std::uint64_t version_ = 0;
  bool is_shared_ = false;
  bool is_of_flat_parameter_ = false;
  bool has_padding_ = false;  // elements that belong to no gradient; they stay zero
};

}  // namespace fsdp
