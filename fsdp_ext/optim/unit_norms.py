"""Norms of the gradients of single units, measured in backward.

An attached optimizer knows the norm of a unit's gradients over all ranks before it steps the unit:
Note [updates in backward] in ``csrc/core/reduce/unit_update.h``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fsdp_ext.optim.norms import NormRanks, norm_dtype, norms_of, total_norm
from fsdp_ext.sharding.params.entries import ShardedParam, gradient_places
from fsdp_ext.sharding.root.unit import Unit

_CALLER = "a backward with an attached optimizer that needs the norm of each unit"


class UnitNorms:
    """The norms of units in the current step."""

    def __init__(self, norm_type: float) -> None:
        self._norm_type = norm_type
        # Weak keys: units own their parts, so a deleted model leaves nothing here.
        self._gradients: WeakKeyDictionary[Hashable, _UnitGradients] = WeakKeyDictionary()
        self._norms: WeakKeyDictionary[Hashable, torch.Tensor] = WeakKeyDictionary()

    @torch.no_grad()
    def measure(self, part: Hashable, params: frozenset[Any], unit: Unit) -> None:
        """Find the norm of a unit's reduced gradients. All ranks call this in the same order."""
        assert unit.impl is not None
        flat = unit.impl.flat_gradient()
        found = self._gradients.get(part)
        if found is None or found.flat is not flat:
            found = self._gradients[part] = _UnitGradients(params, unit, flat)
        norms = {
            ranks: norms_of(own, self._norm_type, found.norm_dtype)
            for ranks, own in found.by_ranks.items()
        }
        self._norms[part] = total_norm(norms, self._norm_type, found.norm_dtype, _CALLER)

    def of(self, part: Hashable) -> torch.Tensor | None:
        """Return the norm of a unit, or None if it is not measured in this step."""
        return self._norms.get(part)

    @torch.no_grad()
    def total(self) -> torch.Tensor:
        """Return the norm of all units of this step together."""
        norms = [*self._norms.values()]
        if not norms:
            return torch.zeros(())
        together = torch.stack([norm.to(norms[0]) for norm in norms])
        total: torch.Tensor = torch.linalg.vector_norm(together, self._norm_type)
        return total

    def reset(self) -> None:
        """Forget the norms of this step."""
        self._norms.clear()


class _UnitGradients:
    """The gradients of a unit's parameters in its flat gradient, by the ranks that shard them.

    The flat gradient also has those that are not in ``.grad`` yet, because only other ranks had a
    gradient. It has zeros for parameters that no rank used.
    """

    def __init__(self, params: frozenset[Any], unit: Unit, flat: torch.Tensor) -> None:
        assert unit.impl is not None
        self.flat = flat
        unit.flat_readers.add(self)
        self.norm_dtype = norm_dtype(params)
        self.by_ranks: defaultdict[NormRanks, list[torch.Tensor]] = defaultdict(list)
        entries = [each if isinstance(each, ShardedParam) else None for each in unit.entries]
        trained = [each for each in entries if each is not None and each.is_trained]
        places = gradient_places(entries, unit.impl.layout, unit.grad_dtype)
        for entry, place in zip(trained, places, strict=True):
            if entry.sharded in params:
                ranks = NormRanks.of(entry.sharded, {entry.sharded: unit}, _CALLER)
                end = place.offset + place.local_shape.numel() * place.dtype.itemsize
                self.by_ranks[ranks].append(flat[place.offset : end].view(place.dtype))

    def free(self) -> None:
        """Let go of the flat gradient, which the unit has left."""
        self.flat = torch.empty(0)
        self.by_ranks.clear()
