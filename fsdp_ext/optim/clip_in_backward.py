"""Clipping for attached optimizers.

Note [clipping in backward]
An attached optimizer steps a unit before backward has computed the gradients of the others, so the
norm of all gradients is not known yet. The gradients are scaled by the norm of the step before,
which is known on all ranks. Each unit adds its part to the norm of the current step, and ``step()``
has the ranks sum the parts. The first step is not scaled, unless the caller passes a norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch

from fsdp_ext.optim.clip import Limits
from fsdp_ext.optim.norms import (
    Gradients,
    NormRanks,
    local_part,
    multiply,
    norm_dtype,
    sum_of_parts,
    total_norm,
)

_CALLER = "step of an attached optimizer"


class ClippingInBackward:
    """Scales gradients by the norm of the step before.

    Args:
        limits: the arguments of the clipping.
        last_norm: the norm of the step before, if it is known.
        params: the optimizer's parameters.
    """

    def __init__(self, limits: Limits, last_norm: float | None, params: list[Any]) -> None:
        self.settings = limits, last_norm
        self.norm: torch.Tensor | None = None
        self._limits = limits
        self._dtype = norm_dtype(params)
        self._scale = torch.ones((), dtype=self._dtype)
        if last_norm is not None:
            self._scale = limits.scale(torch.tensor(last_norm, dtype=self._dtype))
        self._gradients: dict[Hashable, Gradients] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._parts: defaultdict[NormRanks, list[torch.Tensor]] = defaultdict(list)
        self._clipped: set[Hashable] = set()  # the units

    def clip_unit(self, unit: Hashable, params: list[Any]) -> None:
        """Scale the gradients of a unit's parameters in backward.

        Raises:
            RuntimeError: if ``end_step`` was not called after the backward before.
        """
        if unit in self._clipped:
            raise RuntimeError(
                "An attached optimizer that clips got a second backward without step() between "
                "them. Call step() after each backward, also after one that failed: it computes "
                "the norm by which the next step clips."
            )
        self._clipped.add(unit)
        self._clip(self._gradients_of(unit, params))

    @torch.no_grad()
    def end_step(self, params: list[Any]) -> None:
        """Scale gradients that no backward has stepped, and find the norm of this step.

        Args:
            params: all of the optimizer's.
        """
        try:
            left = self._gradients_of(None, params)
            self._clip(left)
            # Units may end in another order on another rank, but all ranks reduce in this order.
            norm_type = self._limits.norm_type
            parts = {
                ranks: sum_of_parts(self._parts[ranks], norm_type, self._dtype)
                for ranks in left.ranks
            }
            self.norm = total_norm(parts, norm_type, self._dtype, _CALLER)
            before = self._scale.to(self.norm.device)
            # A step without gradients does not count.
            self._scale = torch.where(self.norm == 0, before, self._limits.scale(self.norm))
        finally:
            self._begin_step()

    @torch.no_grad()
    def _clip(self, gradients: Gradients) -> None:
        every = []
        for ranks, own in gradients.by_ranks().items():
            if own:
                part = local_part(own, self._limits.norm_type, self._dtype)
                self._parts[ranks].append(part.to(ranks.device_type))
                every += own
        multiply(every, self._scale.to)

    def _gradients_of(self, unit: Hashable, params: list[Any]) -> Gradients:
        found = self._gradients.get(unit)
        if found is None or not found.are_of(params):
            found = self._gradients[unit] = Gradients(params, _CALLER)
        return found
