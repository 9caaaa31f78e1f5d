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

    A parameter may get its first gradient after others. If ``fused`` is true, that needs
    ``dampening=0``, or else ``step`` raises RuntimeError.
    """

    def _init_group(self, group: Any, params: Any, grads: Any, momentums: Any) -> Any:
        found: Any = super()._init_group(group, params, grads, momentums)  # type: ignore[no-untyped-call]
        # PyTorch's fused code needs momentum for no parameter of a group (its first step) or all.
        if group["fused"] and 0 < sum(each is None for each in momentums) < len(momentums):
            if group["dampening"] != 0:
                raise RuntimeError(
                    "fsdp_ext.optim.SGD got a parameter's first gradient in a later step than "
                    "those of its group. PyTorch's fused code cannot step this with dampening. "
                    "Pass foreach=True."
                )
            # Without dampening, a first step equals one from a momentum of 0.
            momentums[:] = [
                torch.zeros_like(param) if each is None else each
                for param, each in zip(params, momentums, strict=True)
            ]
        return found


class Muon(MuonStep):
    """``torch.optim.Muon``, except that one rank orthogonalises each sharded matrix.

    All ranks that shard a matrix have to step it together, and give it a gradient together.
    """
