// The parameters of a unit, and which of them its modules have. The layout counts all of them, and
// gradients only the trainable ones.
//
// Note [registered parameters]
// While a unit is unsharded, its modules have the unsharded parameters as attributes, and otherwise
// the sharded DTensors. (Note [after an evaluation] in core/gather/unit_gather.h has an exception.)
// Each swap is one PyDict_SetItem, which needs the GIL but runs no Python, unless the module has a
// __setattr__ of its own: torch/module_attribute.h. Backward swaps, too, since activation
// checkpointing runs parts of forward again.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/memory/layout.h"
#include "torch/module_attribute.h"
#include "torch/with_python.h"

namespace fsdp {

// A parameter of the layout, or an input of an extension: Note [tensor extensions] in
// fsdp_ext/sharding/params/extensions.py.
struct UnitParameter {
  std::vector<std::int64_t> shape;  // unsharded
  at::ScalarType dtype;             // unsharded
  bool is_input = false;
  bool toggles = false;  // it was frozen before and unfrozen again: Note [frozen parameters]
  // From bind on. An input of an extension has none of these objects. An extension makes its
  // unsharded parameter when it is first attached.
  HeldObject sharded = {};
  // The local tensor of `sharded`; none for extensions and under a flat parameter.
  HeldObject shard = {};
  HeldObject unsharded_object = {};
  // A function that returns the parameter's gradient with the parameter's placements, if the
  // parameter is a DTensor while it is unsharded. Otherwise None.
  HeldObject place_gradient = {};
  at::Tensor unsharded = {};
  bool requires_grad = false;  // when the sharded and the unsharded one last agreed

  void set_unsharded(pybind11::object object);
  bool is_dtensor() const { return !place_gradient.is_none(); }
  bool has_gradient() const { return unsharded.defined() && unsharded.grad().defined(); }
};

// Python's objects for one parameter: sharded, unsharded, place_gradient. Each may be None.
using BoundObjects = std::tuple<pybind11::object, pybind11::object, pybind11::object>;

// Which frozen parameters may stay in a unit that trains them: Note [frozen parameters] in
// torch/torch_unit.h.
enum class AcceptsFrozen : std::uint8_t { None, Toggling, All };

class UnitParameters {
 public:
  // The layout outlives the parameters.
  UnitParameters(const UnitLayout& layout, std::vector<UnitParameter> all);
  // `flat` is None, or the flat parameter, which has the gradient in place of the sharded ones.
  // `attributes` are the attributes of modules that hold these parameters.
  void bind(std::vector<BoundObjects> objects, pybind11::object flat,
            std::vector<ModuleAttribute> attributes);

  std::size_t size() const { return all_.size(); }
  UnitParameter& operator[](std::size_t i) { return all_[i]; }
  const UnitParameter& operator[](std::size_t i) const { return all_[i]; }
  const at::Tensor& sharded(std::size_t i) const;
  const UnitLayout& layout() const { return layout_; }

  // The indices of the trainable parameters among all parameters.
  const std::vector<std::size_t>& trainable() const { return trainable_; }
  UnitParameter& trained(std::size_t i) { return all_[trainable_[i]]; }
  const UnitParameter& trained(std::size_t i) const { return all_[trainable_[i]]; }

  bool has_flat() const { return has_flat_; }
  const HeldObject& flat_object() const { return flat_; }
  const at::Tensor& flat() const;
  // The tensor that holds the gradient of trainable parameter i, and the gradient's place among all
  // gradients.
  const at::Tensor& gradient_owner(std::size_t i) const;
  std::size_t gradient_place(std::size_t i) const { return has_flat_ ? 0 : i; }
  std::size_t gradient_count() const {
    return has_flat_ && !trainable_.empty() ? 1 : trainable_.size();
  }

  // Puts the unsharded or the sharded parameters into the modules: Note [registered parameters].
  // `unit` is the unit's name, for messages.
  void show(bool unsharded, const std::string& unit);
  // Freezes and unfreezes sharded parameters as the user did with the unsharded ones, and vice
  // versa.
  void carry_gradient_settings();
  // The same, and then gives all unsharded parameters the settings of the sharded ones.
  void align_gradient_settings();
  // Whether a parameter was frozen, unfrozen or given a grad_dtype since the unit was made, or the
  // flat parameter has other memory than `flat_shard`. Then the next forward that autograd records
  // needs a new unit.
  bool has_gradient_setting_changed(AcceptsFrozen accepts, const at::Tensor& flat_shard) const;
  // Whether a sharded parameter lies in other memory than when the unit was made. This happens if a
  // module inside a unit is converted or emptied, or if the user swaps tensors. Then the next
  // forward needs a new unit. The caller holds the GIL.
  bool has_other_shards() const;
  // Raises if a parameter was unfrozen since the outermost forward began. Call it when forward
  // enters the unit, and when forward leaves it.
  void check_frozen(const std::string& unit, bool enters) const;

 private:
  void take_gradient_settings();  // from the sharded parameters: see carry_gradient_settings

  const UnitLayout& layout_;
  std::vector<UnitParameter> all_;
  std::vector<std::size_t> trainable_;
  HeldObject flat_;
  bool has_flat_ = false;
  std::vector<ModuleAttribute> attributes_;
  bool shows_unsharded_ = false;
};

}  // namespace fsdp
