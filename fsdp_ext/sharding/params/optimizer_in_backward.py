"""Optimizers of PyTorch's ``_apply_optimizer_in_backward``, which step at the end of backward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_ext import _C
from fsdp_ext.sharding.params.ownership import unsharded_name

# Set by _apply_optimizer_in_backward on a parameter: its optimizers.
_IN_BACKWARD = "_in_backward_optimizers"
# Importing it would give warnings, since it compiles functions by the deprecated torch.jit.
_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class _NotedParams(WeakTensorKeyDictionary):
    """The parameters for which ``_apply_optimizer_in_backward`` was called."""

    def __setitem__(self, param: torch.Tensor, node: Any) -> None:
        super().__setitem__(param, node)
        _C.note_module_change()


def watch_optimizers_in_backward() -> None:
    """Let the next forward of every root look for optimizers that parameters have received.

    Calls do nothing before PyTorch's module is imported, and nothing more after the first one
    that has found it.
    """
    params = _params()
    if params is not None and type(params) is not _NotedParams:
        params.__class__ = _NotedParams
        if len(params) > 0:
            _C.note_module_change()


def refuse_unsharded_with_optimizer(unsharded: nn.Parameter | None) -> None:
    """Raise RuntimeError if an unsharded parameter was given optimizers that step in backward.

    Nothing would step them, because unsharded parameters are copies.
    """
    if unsharded is not None and has_optimizer_in_backward(unsharded):
        raise RuntimeError(
            "_apply_optimizer_in_backward was called with the unsharded "
            f"'{unsharded_name(unsharded)}', which is a copy for one forward and backward, so it "
            "would train nothing. Call it before the first forward, or after reshard()."
        )


def _params() -> Any:
    return getattr(sys.modules.get(_MODULE), "param_to_acc_grad_map", None)


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
