// The gradients of backwards without gradient sync that FSDP1's wrapper shows.
//
// Note [shown gradients]
// FSDP1 shows the gradients that backwards without gradient sync have accumulated: .grad is this
// rank's own, unsharded, and users' changes of it take effect. So units of FSDP1's wrapper do not
// pack these gradients. Autograd keeps adding to the gradients of the unsharded parameters. At the
// end of such a backward they move to .grad of the sharded parameters, or as one tensor to that of
// the flat parameter. The next backward takes the gradients back from there. Meanwhile a sharded
// gradient of an earlier reduction is put aside. It is dropped, too, if the user sets .grad to
// None. On one rank, or with NO_SHARD, the sharded gradient has all elements, so it is added to
// what is shown.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "torch/unit_parameters.h"
#include "torch/with_python.h"

namespace fsdp {

class ShownGradients {
 public:
  // Whether an accumulated gradient is shown, and the sharded gradient that was put aside for it.
  struct Shown {
    bool is_shown = false;
    at::Tensor put_aside;
  };

  // The parameters outlive this. `device` is the device of the unsharded parameters.
  ShownGradients(UnitParameters& parameters, at::Device device)
      : parameters_(parameters), device_(device) {}
  ~ShownGradients();
  ShownGradients(const ShownGradients&) = delete;
  ShownGradients& operator=(const ShownGradients&) = delete;

  // From now on gradients are shown. `wrap` takes the number of a parameter and a whole gradient,
  // and returns the gradient as a DTensor like the sharded parameter. It is called on one rank
  // only.
  void enable(pybind11::object wrap);
  bool is_enabled() const { return is_enabled_; }

  void show_all();  // after a backward
  // Throws if take_back_all() would refuse a gradient. `unit` is for messages.
  void check(const std::string& unit) const;
  void take_back_all(const std::string& unit);  // before a backward
  bool any() const { return any_; }
  // Whether this backward has taken back gradients that are not reduced yet.
  bool has_taken() const { return has_taken_; }
  // Call it when the gradients that were taken back have been packed.
  void reset_taken();
  // Drops all shown gradients, after a backward that failed.
  void discard();
  // Call it when the root is destroyed.
  void leave_root() { set_any(false); }

  // One element for each trainable parameter, to hand over to another unit with the same
  // parameters.
  std::vector<Shown> shown() const;
  void adopt(std::size_t trainable, Shown shown);

 private:
  void set_any(bool value);
  std::int64_t flat_numel() const;
  std::vector<at::Tensor> parts_of(const at::Tensor& flat) const;
  void show_flat();
  void show(std::size_t trainable, at::Tensor gradient);
  bool is_whole(std::size_t trainable) const;
  at::Tensor as_sharded(std::size_t trainable, const at::Tensor& gradient) const;
  at::Tensor shown_gradient(std::size_t trainable, const std::string& unit) const;
  void take_back(std::size_t trainable, const at::Tensor& gradient);
  void add_gradient(std::size_t parameter, at::Tensor gradient);

  UnitParameters& parameters_;
  const at::Device device_;
  HeldObject wrap_;
  bool is_enabled_ = false;
  std::vector<Shown> shown_;  // of each gradient
  bool any_ = false;
  bool has_taken_ = false;
  at::Tensor taken_flat_;  // in backward: the unsharded parameters' gradients are views of it
};

// Whether some .grad in the process may be unreduced.
bool any_unit_shows_gradients();

}  // namespace fsdp
