"""Casts of the inputs and outputs of a wrapper's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_ext._util.containers import map_tensors


def map_floating(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with the result of ``fn`` in place of each floating-point tensor."""
    if isinstance(value, torch.Tensor):
        return fn(value) if value.is_floating_point() else value
    return map_tensors(lambda item: map_floating(fn, item), value)


def run_in_float32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module that mixed precision ignores, and return the dtype that came in."""
    dtypes: list[torch.dtype] = []

    def to_float32(tensor: torch.Tensor) -> torch.Tensor:
        dtypes.append(tensor.dtype)
        return tensor.float()

    args, kwargs = map_floating(to_float32, (args, kwargs))
    output = module(*args, **kwargs)
    return map_floating(lambda x: x.to(dtypes[0]), output) if dtypes else output
