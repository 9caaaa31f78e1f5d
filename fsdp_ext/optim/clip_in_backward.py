"""Clipping for attached optimizers, and skipping of gradients that are not finite.

Note [clipping in backward]
An attached optimizer steps a unit before backward has computed the gradients of the others, so the
norm of all gradients is not known yet. There are two ways to clip:
- By the last step: gradients are scaled by the norm of the step before, which is known on all
  ranks. Each unit adds its part to the norm of the current step, and ``step()`` has the ranks sum
  the parts. The first step is not scaled, unless the caller passes a norm. If the norm is not
  finite, the next step is scaled as this one.
- By unit: each unit's gradients are scaled by their own norm, which ranks find before they step the
  unit: Note [updates in backward] in ``csrc/core/reduce/unit_update.h``.
A unit is skipped if its own norm is not finite, so all ranks skip it together. PyTorch's fused code
skips it without a wait of the host, as it does for a GradScaler. Other code is not called.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from fsdp_ext import _C
from fsdp_ext._util.numbers import as_bool
from fsdp_ext.optim.clip import Limits, number_of
from fsdp_ext.optim.norms import (
    NormRanks,
    final_roots,
    multiply,
    norm_dtype,
    norms_of,
    total_norm,
)
from fsdp_ext.sharding.params.entries import ShardedParam, gradient_places
from fsdp_ext.sharding.root.unit import Unit, owners_of, units_alive

_CALLER = "step of an attached optimizer"
_OF_UNITS = "a backward with an attached optimizer that needs the norm of each unit"
_BY_LAST_STEP, _BY_UNIT = "last_step", "unit"


@dataclass(frozen=True)
class Safeguards:
    """The checked arguments of ``attach`` for gradients that are too large or not finite."""

    limits: Limits | None = None  # of the clipping; None for none
    last_norm: float | None = None  # the norm of the step before, if it is known
    clip_by: str = _BY_LAST_STEP  # "last_step" or "unit"
    skip_nonfinite: bool = False  # whether units with gradients that are not finite are skipped

    @classmethod
    def of(
        cls, max_norm: Any, norm_type: Any, last_norm: Any, clip_by: str, skip_nonfinite: bool
    ) -> Safeguards:
        """Check the arguments of ``attach``."""
        before = None if last_norm is None else number_of("attach", "last_norm", last_norm)
        if clip_by not in (_BY_LAST_STEP, _BY_UNIT):
            raise ValueError(f"attach got clip_by={clip_by!r}. Pass 'last_step' or 'unit'.")
        if max_norm is None and (before is not None or clip_by == _BY_UNIT):
            passed = "clip_by='unit'" if before is None else "last_norm"
            raise ValueError(f"attach got {passed} without max_norm. Pass both, or none.")
        if before is not None and clip_by == _BY_UNIT:
            raise ValueError(
                "attach got last_norm and clip_by='unit', which clips no unit by the last norm. "
                "Leave out one of them."
            )
        if before is not None and not 0 <= before < math.inf:
            raise ValueError(
                f"attach got last_norm={before}. Pass the grad_norm of the last step, a finite "
                "number of 0 or more."
            )
        limits = None if max_norm is None else Limits.of("attach", max_norm, norm_type)
        return cls(limits, before, clip_by, as_bool("attach", "skip_nonfinite", skip_nonfinite))

    def __str__(self) -> str:
        """Return the arguments that are not the defaults."""
        passed = {
            name: value for name, value in vars(self).items() if value != getattr(Safeguards, name)
        }
        limits = passed.pop("limits", None)
        passed = {**vars(limits), **passed} if limits else passed
        return ", ".join(f"{name}={value!r}" for name, value in passed.items())

    def make(self, params: list[Any]) -> InBackward | None:
        """Return an object that clips and skips so; None if nothing is to be done."""
        if self.limits is None:
            return InBackward(self, 2.0) if self.skip_nonfinite else None
        if self.clip_by == _BY_UNIT:
            return ClippingByUnit(self, self.limits)
        return ClippingByLastStep(self, self.limits, params)


class InBackward:
    """Finds units whose gradients are not finite, and clips nothing."""

    def __init__(self, settings: Safeguards, norm_type: float) -> None:
        self.settings = settings
        self.norm: torch.Tensor | None = None  # of the last step
        self._norm_type = norm_type
        # Weak keys: units own their parts, so a deleted model leaves nothing here.
        self._gradients: WeakKeyDictionary[Hashable, _UnitGradients] = WeakKeyDictionary()
        self._unit_norms: WeakKeyDictionary[Hashable, torch.Tensor] = WeakKeyDictionary()

    @property
    def key(self) -> Callable[[Any], Hashable] | None:
        """Maps a parameter to a value. All parameters of a run have to have equal values.

        None if norms are not those of runs, which include the padding between gradients.
        """
        return None

    @property
    def measures(self) -> bool:
        """Whether :meth:`measure` has to be called for each unit before it is stepped."""
        return self.settings.skip_nonfinite

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
        self._unit_norms[part] = total_norm(norms, self._norm_type, found.norm_dtype, _OF_UNITS)

    def nonfinite(self, part: Hashable) -> torch.Tensor | None:
        """Return 1.0 if a part of the parameters is to be skipped; None if it never is."""
        norm = self._unit_norms.get(part) if self.settings.skip_nonfinite else None
        return None if norm is None else norm.isfinite().logical_not().float()

    def note(self, params: list[Any]) -> None:
        """Note the optimizer's parameters, which all ranks have in the same order."""

    def clip(self, part: Hashable, stepped: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Scale the gradients of a part of the parameters.

        Args:
            part: the part.
            stepped: tensors with a gradient, each with a parameter that lies in it.
        """

    @torch.no_grad()
    def end_step(self) -> None:
        """Find the norm of all units of this step together."""
        norms = [*self._unit_norms.values()]
        self._unit_norms.clear()
        self.norm = torch.zeros(())
        if norms:
            together = torch.stack([norm.to(norms[0]) for norm in norms])
            self.norm = torch.linalg.vector_norm(together, self._norm_type)


class ClippingByUnit(InBackward):
    """Scales each unit's gradients by their own norm, but not those left to ``step()``."""

    def __init__(self, settings: Safeguards, limits: Limits) -> None:
        super().__init__(settings, limits.norm_type)
        self._limits = limits

    @property
    def measures(self) -> bool:
        return True

    @torch.no_grad()
    def clip(self, part: Hashable, stepped: Iterable[tuple[Any, torch.Tensor]]) -> None:
        norm = self._unit_norms.get(part)
        if norm is not None:
            grads = [whole.grad for _, whole in stepped if whole.grad is not None]
            multiply(grads, self._limits.scale(norm).to)


class ClippingByLastStep(InBackward):
    """Scales gradients by the norm of the step before."""

    def __init__(self, settings: Safeguards, limits: Limits, params: list[Any]) -> None:
        super().__init__(settings, limits.norm_type)
        self._limits = limits
        self._params: list[Any] = []
        self._units: WeakSet[Unit] = WeakSet()  # of the parameters
        self._final_roots = 0  # of these units, when the ranks were found
        self._known_ranks: dict[Any, NormRanks] = {}
        self.note(params)
        self._scale = torch.ones((), dtype=self._dtype)
        if settings.last_norm is not None:
            self._scale = limits.scale(torch.tensor(settings.last_norm, dtype=self._dtype))
        self._begin_step()

    def note(self, params: list[Any]) -> None:
        if not _C.same_objects(params, self._params):
            self._known_ranks = {}
            self._params = params
            self._dtype = norm_dtype(params)

    @property
    def _ranks(self) -> dict[Any, NormRanks]:
        """The ranks of each parameter. They are found in a step, when there are roots."""
        if not self._known_ranks:
            owners = owners_of(units_alive())
            self._known_ranks = {p: NormRanks.of(p, owners, _CALLER) for p in self._params}
            self._units = WeakSet(owners[p] for p in self._params if p in owners)
            self._final_roots = final_roots(self._units)
        return self._known_ranks

    @property
    def key(self) -> Callable[[Any], Hashable]:
        return self._ranks_of

    def _ranks_of(self, param: Any) -> NormRanks:
        return self._ranks[param]

    def _begin_step(self) -> None:
        self._norms: defaultdict[NormRanks, list[torch.Tensor]] = defaultdict(list)
        self._clipped: set[Hashable] = set()
        if self._final_roots != final_roots(self._units):
            self._known_ranks = {}

    @torch.no_grad()
    def clip(self, part: Hashable, stepped: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Scale the gradients of a part, and add them to the norm of this step."""
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
        self._unit_norms.clear()
        try:
            # Units may end in another order on another rank, but all ranks reduce in this order.
            norms = {ranks: self._norms[ranks] for ranks in dict.fromkeys(self._ranks.values())}
            self.norm = total_norm(norms, self._limits.norm_type, self._dtype, _CALLER)
            before = self._scale.to(self.norm.device)
            # A step without gradients does not count, and NaN would stay for ever.
            counts = self.norm.isfinite() & (self.norm > 0)
            self._scale = torch.where(counts, self._limits.scale(self.norm), before)
        finally:
            self._begin_step()


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
                # Not over the root's ranks: backward may not reach the unit on other meshes.
                ranks = NormRanks.of(entry.sharded, {}, _OF_UNITS)
                end = place.offset + place.local_shape.numel() * place.dtype.itemsize
                self.by_ranks[ranks].append(flat[place.offset : end].view(place.dtype))

    def free(self) -> None:
        """Let go of the flat gradient, which the unit has left."""
        self.flat = torch.empty(0)
        self.by_ranks.clear()
