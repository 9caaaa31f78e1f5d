"""Whether an optimizer's step runs PyTorch's fused code.

Note [fused steps]
Groups and state dicts have the ``foreach`` and ``fused`` that the user passed, so PyTorch's
optimizers go on from them as from their own. A group with None for both has a fused step if
PyTorch's fused code can step its tensors, and PyTorch's default step otherwise. The choice is made
in each step, and only PyTorch's code sees it: Note [stand-ins] in optim/stand_in.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_ext.sharding.params.flat_parameter import is_flat


class FusedSteps(Optimizer):
    """Runs PyTorch's fused code by default: Note [fused steps]."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over states, as PyTorch's does for ``load_state_dict`` and copies."""
        super().__setstate__(state)
        for group in filter(asks_for_fused, self.param_groups):
            for param in group["params"]:
                # PyTorch's fused code needs counts of steps on the parameter's device.
                own = self.state.get(param, {})
                if isinstance(own.get("step"), torch.Tensor):
                    own["step"] = own["step"].to(param.device, torch.float32)

    # GradScaler asks whether the step unscales gradients. If not, the scaler unscales them before
    # the step, and skips the step if one is not finite.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        if vars(self).get("_attached"):
            return True  # the step refuses the scaler
        # Each rank has another part of a flat gradient, and may find Inf alone. All ranks skip the
        # step together only if ShardedGradScaler unscales the gradients itself.
        return all(
            group["fused"] and not any(map(is_flat, group["params"])) for group in self.param_groups
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore what PyTorch's constructors set, because groups may be loaded later."""

    @property
    def _is_scaled(self) -> bool:
        """Whether a GradScaler leaves it to this step to unscale the gradients."""
        return getattr(self, "found_inf", None) is not None

    @property
    def _may_be_skipped(self) -> bool:
        """Whether PyTorch's fused code may skip a step."""
        return self._is_scaled

    def _fits_fused_code(self, group: dict[str, Any], stepped: dict[torch.Tensor, Any]) -> bool:
        """Return whether PyTorch's fused code gives correct results for these tensors."""
        return True

    def _fused_now(self, group: dict[str, Any], *, fits: bool) -> bool | None:
        """Return a group's ``fused`` for one step.

        ``fits`` says whether PyTorch's fused code can step its tensors.
        """
        if not asks_for_fused(group):
            fused: bool | None = group["fused"]
            return fused
        if not fits and self._is_scaled:
            raise RuntimeError(
                f"fsdp_ext.optim.{type(self).__name__} got fused=True and a GradScaler for "
                "parameters that PyTorch's fused code cannot step. Leave out fused=True, so that "
                "the scaler unscales gradients before the step."
            )
        return True if fits else None


def asks_for_fused(group: dict[str, Any]) -> bool:
    """Return whether a group is to have a fused step where possible."""
    return group["fused"] or (group["fused"] is None and group["foreach"] is None)
