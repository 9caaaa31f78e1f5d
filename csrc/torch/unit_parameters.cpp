#include "torch/unit_parameters.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "torch/dtype.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// The dtype that gradients of the parameter are to have, if the user has set another one than its
// own.
std::optional<DType> grad_dtype_of(const at::Tensor& parameter) {
  const auto asked = torch::autograd::impl::get_autograd_meta(parameter)->grad_dtype(parameter);
  const bool is_set = asked.has_value() && *asked != parameter.scalar_type();
  return is_set ? std::make_optional(to_dtype(*asked)) : std::nullopt;
}

// Whether a parameter's gradient settings differ from those when its unit was made.
bool differs(const at::Tensor& parameter, bool trainable, std::optional<DType> grad_dtype) {
  return parameter.requires_grad() != trainable ||
         (trainable && grad_dtype_of(parameter) != grad_dtype);
}

py::object shard_of(const py::object& sharded) {
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  return sharded.attr(py::handle(name));
}

}  // namespace

void UnitParameter::set_unsharded(py::object object) {
  unsharded_object = std::move(object);
  if (!unsharded_object.is_none()) {
    unsharded = THPVariable_Unpack(unsharded_object.ptr());
  }
}

UnitParameters::UnitParameters(const UnitLayout& layout, std::vector<UnitParameter> all)
    : layout_(layout), all_(std::move(all)) {
  FSDP_CHECK(all_.size() == layout_.params().size(), "TorchUnit got ", all_.size(),
             " parameters. The layout has ", layout_.params().size(), ".");
  for (std::size_t i = 0; i < layout_.params().size(); ++i) {
    if (layout_.params()[i].trainable) {
      trainable_.push_back(i);
    }
  }
}

void UnitParameters::bind(std::vector<BoundObjects> objects, py::object flat,
                          std::vector<ModuleAttribute> attributes) {
  FSDP_CHECK(objects.size() == all_.size(), "bind got ", objects.size(),
             " parameters. The layout has ", all_.size(), ".");
  for (std::size_t i = 0; i < objects.size(); ++i) {
    auto& [sharded, unsharded, place_gradient] = objects[i];
    if (!unsharded.is_none() && flat.is_none()) {
      all_[i].shard = shard_of(sharded);
    }
    all_[i].sharded = std::move(sharded);
    all_[i].set_unsharded(std::move(unsharded));
    all_[i].place_gradient = std::move(place_gradient);
    all_[i].requires_grad = layout_.params()[i].trainable;
  }
  has_flat_ = !flat.is_none();
  flat_ = std::move(flat);
  attributes_ = std::move(attributes);
}

// Unpacked anew each time: swap_tensors (module.to()) exchanges the tensor behind the object.
const at::Tensor& UnitParameters::sharded(std::size_t i) const {
  return THPVariable_Unpack(all_[i].sharded.ptr());
}

const at::Tensor& UnitParameters::flat() const { return THPVariable_Unpack(flat_.ptr()); }

const at::Tensor& UnitParameters::gradient_owner(std::size_t i) const {
  return has_flat_ ? flat() : sharded(trainable_[i]);
}

// See Note [registered parameters].
void UnitParameters::show(bool unsharded, const std::string& unit) {
  if (shows_unsharded_ == unsharded) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (unsharded) {
    take_gradient_settings();
  } else {
    carry_gradient_settings();
  }
  const auto objects = [this](bool are_unsharded, std::size_t parameter) {
    const UnitParameter& of = all_[parameter];
    return (are_unsharded ? of.unsharded_object : of.sharded).ptr();
  };
  auto attribute = attributes_.cbegin();
  // Restores the attributes before `end`, so that the next use finds all of them unchanged.
  const auto put_back_until = [&](auto end) {
    for (auto changed = attributes_.cbegin(); changed != end; ++changed) {
      changed->put(objects(!unsharded, changed->parameter()));
    }
  };
  try {
    for (; attribute != attributes_.cend(); ++attribute) {
      const std::size_t parameter = attribute->parameter();
      PyObject* const shown = objects(unsharded, parameter);
      // torch.func.functional_call puts the sharded parameter back when forward has returned.
      FSDP_CHECK(attribute->swap(objects(!unsharded, parameter), shown) ||
                     (!unsharded && attribute->is(shown)),
                 "parameter '", layout_.params()[parameter].name, "' of unit '", unit,
                 "' was replaced after fully_shard. Change parameters in place, or through "
                 "load_state_dict or module.to().");
    }
  } catch (const python_error&) {  // of a module's __setattr__, which may have set this attribute
    put_back_until(attribute + 1);
    throw;
  } catch (const Error&) {  // this attribute has the user's parameter, which stays
    put_back_until(attribute);
    throw;
  }
  shows_unsharded_ = unsharded;
}

void UnitParameters::carry_gradient_settings() {
  if (!shows_unsharded_ || has_flat_) {
    return;
  }
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].sharded.is_none() || !all_[i].unsharded.defined()) {
      continue;
    }
    const bool was = all_[i].requires_grad;
    if (all_[i].unsharded.requires_grad() != was) {
      sharded(i).set_requires_grad(!was);
    } else if (sharded(i).requires_grad() != was && layout_.params()[i].trainable) {
      all_[i].unsharded.set_requires_grad(!was);
    }
    all_[i].requires_grad = all_[i].unsharded.requires_grad();
  }
}

// The user may have frozen sharded parameters while the modules showed them. After an evaluation
// the unit may be unsharded then: Note [after an evaluation] in core/gather/unit_gather.h.
void UnitParameters::take_gradient_settings() {
  for (const std::size_t i : trainable_) {
    const bool requires_grad = sharded(i).requires_grad();
    if (all_[i].unsharded.requires_grad() != requires_grad) {
      all_[i].unsharded.set_requires_grad(requires_grad);
    }
    all_[i].requires_grad = requires_grad;
  }
}

void UnitParameters::align_gradient_settings() {
  carry_gradient_settings();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (!all_[i].sharded.is_none() && all_[i].unsharded.defined()) {
      all_[i].requires_grad = sharded(i).requires_grad();
      all_[i].unsharded.set_requires_grad(all_[i].requires_grad);
    }
  }
}

// The layout has no place for the gradient of such a parameter. When forward enters the unit, users
// may have unfrozen its sharded parameters. After that they see the unsharded ones. If forward has
// used an unfrozen one, autograd has made a node for its gradient.
void UnitParameters::check_frozen(const std::string& unit, bool enters) const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const ParamSpec& spec = layout_.params()[i];
    if (spec.trainable || all_[i].sharded.is_none()) {
      continue;
    }
    const at::Tensor& unsharded = all_[i].unsharded;
    const bool is_shown_unfrozen = unsharded.defined() && unsharded.requires_grad();
    const bool is_unfrozen =
        !enters && is_shown_unfrozen
            ? torch::autograd::impl::try_get_grad_accumulator(unsharded) != nullptr
            : (has_flat_ ? flat() : sharded(i)).requires_grad();
    FSDP_CHECK(!is_unfrozen, "Parameter '", spec.name, "' of unit '", unit,
               "' was unfrozen while forward ran, and its gradient would be lost. Set its "
               "requires_grad before the forward of the root module.");
  }
}

// See Note [frozen parameters] in torch/torch_unit.h.
bool UnitParameters::has_gradient_setting_changed(AcceptsFrozen accepts,
                                                  const at::Tensor& flat_shard) const {
  if (has_flat_) {
    const at::Tensor& flat = this->flat();
    const bool trainable = !trainable_.empty();
    const bool stays = accepts == AcceptsFrozen::All && trainable && !flat.requires_grad() &&
                       !sharded(trainable_[0]).requires_grad();
    return (differs(flat, trainable, std::nullopt) && !stays) ||
           !flat.storage().is_alias_of(flat_shard.storage());
  }
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const ParamSpec& spec = layout_.params()[i];
    if (all_[i].sharded.is_none() ||
        !differs(sharded(i), spec.trainable, spec.unsharded_grad_dtype)) {
      continue;
    }
    const bool may_stay =
        accepts == AcceptsFrozen::All || (accepts == AcceptsFrozen::Toggling && all_[i].toggles);
    if (!may_stay || !spec.trainable || sharded(i).requires_grad()) {
      return true;
    }
  }
  return false;
}

bool UnitParameters::has_other_shards() const {
  return std::any_of(all_.begin(), all_.end(), [](const UnitParameter& parameter) {
    if (!parameter.shard) {
      return false;
    }
    const py::object now = shard_of(parameter.sharded);
    if (now.is(parameter.shard)) {
      return false;
    }
    // A conversion that changes nothing makes another tensor in the same memory.
    return !THPVariable_Unpack(now.ptr()).is_alias_of(THPVariable_Unpack(parameter.shard.ptr()));
  });
}

}  // namespace fsdp
