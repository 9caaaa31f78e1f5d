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

    Where PyTorch's fused code cannot step a group, the group steps as with ``foreach=True``, and a
    ``GradScaler`` is refused. This holds for bfloat16 and float16 parameters on the CPU, and with
    dampening if parameters of the group get their first gradient after others. With dampening and
    momentum, a ``GradScaler`` is also refused for the first step.
    """

    def _step(self, part: Any) -> None:
        try:
            super()._step(part)
        finally:
            for group, foreach in vars(self).pop("_not_fused", ()):
                group.update(foreach=foreach, fused=True)

    def _init_group(self, group: Any, params: Any, grads: Any, momentums: Any) -> Any:
        found: Any = super()._init_group(group, params, grads, momentums)  # type: ignore[no-untyped-call]
        if not group["fused"]:
            return found
        # PyTorch's fused code needs momentum for no parameter of a group (its first step) or all.
        # It leaves the momentum uninitialised if a GradScaler skips the first step.
        is_scaled = getattr(self, "found_inf", None) is not None
        new = sum(each is None for each in momentums)
        some_are_new = new > 0 and (new < len(momentums) or is_scaled)
        if any(map(_loses_fused_updates, params)) or (some_are_new and group["dampening"] != 0):
            if is_scaled:
                raise RuntimeError(
                    "fsdp_ext.optim.SGD got a GradScaler for parameters that PyTorch's fused code "
                    "cannot step: bfloat16 or float16 on the CPU, or, with dampening, parameters "
                    "without momentum yet. Pass foreach=True."
                )
            vars(self).setdefault("_not_fused", []).append((group, group["foreach"]))
            group.update(foreach=True, fused=False)
        elif some_are_new:  # without dampening, a first step equals one from a momentum of 0
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
