"""Optimizers of PyTorch's ``_apply_optimizer_in_backward``, which step at the end of backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Set by _apply_optimizer_in_backward on a parameter: its optimizers.
_IN_BACKWARD = "_in_backward_optimizers"


def has_optimizer_in_backward(param: nn.Parameter) -> bool:
    """Return whether ``_apply_optimizer_in_backward`` was called for ``param``."""
    return bool(getattr(param, _IN_BACKWARD, None))


def let_backward_step(sharded: nn.Parameter) -> None:
    """Let each backward that gives ``sharded`` a gradient step its optimizers.

    PyTorch's own hook is on a node of autograd that never runs for a sharded parameter.
    """
    hooked: Any = sharded  # torch leaves these untyped
    hooks = hooked._post_accumulate_grad_hooks or {}
    if has_optimizer_in_backward(sharded) and _step_in_backward not in hooks.values():
        hooked.register_post_accumulate_grad_hook(_step_in_backward)


def _step_in_backward(sharded: torch.Tensor) -> None:
    optimizers = getattr(sharded, _IN_BACKWARD, ())
    for optimizer in optimizers:
        optimizer.step()
    if optimizers:
        sharded.grad = None
