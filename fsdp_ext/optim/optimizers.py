"""PyTorch's optimizers, stepping shards."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_ext.optim.flat_step import FlatStep
from fsdp_ext.optim.muon import MuonStep


class AdamW(FlatStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` over one tensor for each unit instead of one for each parameter."""


class Adam(FlatStep, torch.optim.Adam):
    """``torch.optim.Adam`` over one tensor for each unit instead of one for each parameter."""


class SGD(FlatStep, torch.optim.SGD):
    """``torch.optim.SGD`` over one tensor for each unit instead of one for each parameter.

    PyTorch's fused code cannot step bfloat16 and float16 parameters on the CPU, and a group with
    dampening in which parameters get their first gradient after others.
    """

    def _fits_fused_code(self, group: dict[str, Any], stepped: dict[torch.Tensor, Any]) -> bool:
        if any(map(_loses_fused_updates, stepped)):
            return False
        if group["momentum"] == 0 or group["dampening"] == 0:
            return True
        # PyTorch's fused code needs momentum for no parameter of a group (its first step) or all.
        # It leaves the momentum uninitialised if it skips the first step.
        new = sum(states.get("momentum_buffer") is None for states in stepped.values())
        return new == 0 or (new == len(stepped) and not self._may_be_skipped)

    def _init_group(self, group: Any, params: Any, grads: Any, momentums: Any) -> Any:
        found: Any = super()._init_group(group, params, grads, momentums)  # type: ignore[no-untyped-call]
        if group["fused"] and group["dampening"] == 0 and any(each is None for each in momentums):
            # A first step equals one from a momentum of 0.
            momentums[:] = [
                torch.zeros_like(param) if each is None else each
                for param, each in zip(params, momentums, strict=True)
            ]
        return found


def _loses_fused_updates(param: torch.Tensor) -> bool:
    # PyTorch's fused SGD changes the momentum of such parameters, and not the parameters:
    # https://github.com/pytorch/pytorch/issues/191763
    return param.is_cpu and param.dtype in (torch.bfloat16, torch.float16)


class Muon(MuonStep):
    """``torch.optim.Muon``, except that one rank orthogonalises each sharded matrix.

    All ranks that shard a matrix have to step it together, and give it a gradient together.
    """
