"""Clipping for attached optimizers.

Note [clipping in backward]
An attached optimizer steps a unit before backward has computed the gradients of the others, so the
norm of all gradients is not known yet. The gradients are scaled by the norm of the step before,
which is known on all ranks. Each unit adds its part to the norm of the current step, and ``step()``
has the ranks sum the parts. The first step is not scaled, unless the caller passes a norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from fsdp_ext import _C
from fsdp_ext.optim.clip import Limits
from fsdp_ext.optim.norms import NormRanks, multiply, norm_dtype, norms_of, total_norm
from fsdp_ext.sharding.root.unit import owners_of, units_alive

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
        self._params: list[Any] = []
        self._ranks: dict[Any, NormRanks] = {}
        self.note(params)
        self._scale = torch.ones((), dtype=self._dtype)
        if last_norm is not None:
            self._scale = limits.scale(torch.tensor(last_norm, dtype=self._dtype))
        self._begin_step()

    def note(self, params: list[Any]) -> None:
        """Note the optimizer's parameters, which all ranks have in the same order."""
        if not _C.same_objects(params, self._params):
            owners = owners_of(units_alive())
            self._ranks = {param: NormRanks.of(param, owners, _CALLER) for param in params}
            self._all_ranks = list(dict.fromkeys(self._ranks.values()))
            self._params = params
            self._dtype = norm_dtype(params)

    def ranks_of(self, param: Any) -> NormRanks:
        """Return the ranks over which a parameter's gradient is sharded."""
        return self._ranks[param]

    def _begin_step(self) -> None:
        self._norms: defaultdict[NormRanks, list[torch.Tensor]] = defaultdict(list)
        self._clipped: set[Hashable] = set()

    @torch.no_grad()
    def clip(self, part: Hashable, stepped: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Scale the gradients of a part of the parameters, and add them to the norm of this step.

        Args:
            part: the part.
            stepped: tensors with a gradient, each with a parameter that lies in it.
        """
        if part in self._clipped:
            raise RuntimeError(
                "An attached optimizer that clips got a second backward without step() between "
                "them. Call step() after each backward, also after one that failed: it computes "
                "the norm by which the next step clips."
            )
        self._clipped.add(part)
        by_ranks: defaultdict[NormRanks, list[torch.Tensor]] = defaultdict(list)
        for param, whole in stepped:
            assert whole.grad is not None
            by_ranks[self._ranks[param]].append(whole.grad)
        for ranks, own in by_ranks.items():
            self._norms[ranks] += norms_of(own, self._limits.norm_type, self._dtype)
            multiply(own, self._scale.to)

    @torch.no_grad()
    def end_step(self) -> None:
        """Find the norm of this step, by which the next one is clipped."""
        try:
            # Units may end in another order on another rank, but all ranks reduce in this order.
            norms = {ranks: self._norms[ranks] for ranks in self._all_ranks}
            self.norm = total_norm(norms, self._limits.norm_type, self._dtype, _CALLER)
            before = self._scale.to(self.norm.device)
            # A step without gradients does not count.
            self._scale = torch.where(self.norm == 0, before, self._limits.scale(self.norm))
        finally:
            self._begin_step()
