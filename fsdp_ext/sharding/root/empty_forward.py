"""How a rank takes part in the forward of units that it does not run."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_ext.sharding.root.module_state import unit_of


def join_empty(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """See :meth:`fsdp_ext.FSDPModule.join_empty`."""
    unit = unit_of(module)
    if unit is None:
        return _join_children(module, tensor)
    if unit.impl is None:
        raise RuntimeError(
            f"join_empty was called on unit '{unit.name}' before the first forward of the root "
            "module. Call it in that forward."
        )
    tensor = _join_children(module, unit.impl.begin_skip(tensor))
    unit.impl.end_skip(unit.modules.index(module), tensor)
    return tensor


def _join_children(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    for child in module.children():
        tensor = join_empty(child, tensor)
    return tensor
