"""Copies of models on the meta device: shapes and dtypes without memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ext.sharding.api.fsdp_module import original_class
from fsdp_ext.sharding.params.ownership import own_grad_dtype
from fsdp_ext.sharding.root.module_state import is_state

# Attributes with hooks. Hooks, those of fully_shard above all, belong to the original model.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def meta_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of ``model`` without memory, and the copy of each of its modules.

    Shared parameters are shared in the copy, too. The copy has no hooks and no traces of
    ``fully_shard``. It shares attributes that cannot be copied with the original.
    """
    memo: dict[int, Any] = {}
    shells: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        cls: Any = original_class(type(module))
        shells[module] = memo[id(module)] = cls.__new__(cls)
        attributes = {**module.__dict__, **module._parameters, **module._buffers}
        for value in attributes.values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _without_memory(value)
    for module, shell in shells.items():
        shell.__dict__.update(
            (name, type(value)() if name in _HOOKS else _copied(value, memo))
            for name, value in module.__dict__.items()
            if not is_state(name)
        )
    return shells[model], shells


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        grad_dtype = own_grad_dtype(tensor)
        if grad_dtype is not None:
            copied.grad_dtype = grad_dtype
        return copied
    return empty


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a handle, a process group
        return value
