// Which parameters of a unit are trained, and how users change that.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>

#include "torch/dtype.h"
#include "torch/torch_unit.h"

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

}  // namespace

void TorchUnit::carry_gradient_settings() {
  if (!unsharded_registered_ || parameters_.has_flat()) {
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].sharded.is_none() || !parameters_[i].unsharded.defined()) {
      continue;
    }
    const bool was = parameters_[i].requires_grad;
    if (parameters_[i].unsharded.requires_grad() != was) {
      parameters_.sharded(i).set_requires_grad(!was);
    } else if (parameters_.sharded(i).requires_grad() != was && layout_.params()[i].trainable) {
      parameters_[i].unsharded.set_requires_grad(!was);
    }
    parameters_[i].requires_grad = parameters_[i].unsharded.requires_grad();
  }
}

// The user may have frozen sharded parameters while the modules showed them. After an evaluation
// the unit may be unsharded then: Note [after an evaluation] in core/gather/unit_gather.h.
void TorchUnit::take_gradient_settings() {
  for (const std::size_t i : parameters_.trainable()) {
    const bool requires_grad = parameters_.sharded(i).requires_grad();
    if (parameters_[i].unsharded.requires_grad() != requires_grad) {
      parameters_[i].unsharded.set_requires_grad(requires_grad);
    }
    parameters_[i].requires_grad = requires_grad;
  }
}

// See Note [frozen while gradients accumulate].
bool TorchUnit::has_gradient_setting_changed(bool awaits_reduction) const {
  const auto is_frozen_until_reduced = [&](const at::Tensor& parameter, bool trainable) {
    return awaits_reduction && trainable && !parameter.requires_grad();
  };
  if (parameters_.has_flat()) {
    const at::Tensor& flat = parameters_.flat();
    const bool trainable = !parameters_.trainable().empty();
    const bool stays = is_frozen_until_reduced(flat, trainable) &&
                       !parameters_.sharded(parameters_.trainable()[0]).requires_grad();
    return (differs(flat, trainable, std::nullopt) && !stays) ||
           !flat.storage().is_alias_of(tensors_.shard.flat().storage());
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParamSpec& spec = layout_.params()[i];
    if (!parameters_[i].sharded.is_none() &&
        differs(parameters_.sharded(i), spec.trainable, spec.unsharded_grad_dtype) &&
        !is_frozen_until_reduced(parameters_.sharded(i), spec.trainable)) {
      return true;
    }
  }
  return false;
}

}  // namespace fsdp
