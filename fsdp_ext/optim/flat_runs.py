"""Parameters that lie side by side in flat memory, taken as one tensor.

Note [flat runs]
The sharded parameters of a unit lie in its flat shard, and after backward their gradients lie in
its flat gradient, in the same order. So an operation on each element of many parameters can be one
operation on a *run*: a part of the flat shard with parameters side by side, and the same part of
the flat gradient. Elements between parameters are padding. Between gradients it has to be zero in a
norm. Clipping multiplies it, too, and a norm that is not finite makes it NaN. So it is cleared
before each norm.

Runs are found once. Every later call checks that nothing has changed: the parameters, their memory,
and which of them have their part of the flat gradient in ``.grad``. A parameter is in no run if it
has no gradient, or if its gradient lies elsewhere or has another dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.sharding.params.dtensors import Spread
from fsdp_ext.sharding.params.entries import ShardedParam, lies_in
from fsdp_ext.sharding.root.unit import Unit, owners_of, units_alive


@dataclass
class FlatRun:
    """A run: Note [flat runs]."""

    params: list[nn.Parameter]  # in order
    spreads: list[Spread]  # how each parameter is spread over ranks
    offsets: list[int]  # the first element of each parameter in the run
    whole: torch.Tensor  # the run, a 1-D tensor whose ``.grad`` is the run of gradients
    padding: torch.Tensor  # the elements between parameters

    @property
    def grad(self) -> torch.Tensor:
        """The run of gradients."""
        grad = self.whole.grad
        assert grad is not None
        return grad

    def parts_of(self, like_whole: torch.Tensor) -> list[DTensor]:
        """Return the part of each parameter in a tensor of the run's shape."""
        dtype = like_whole.dtype
        shapes = [param._local_tensor.shape for param in self.params]  # type: ignore[attr-defined]
        return [
            spread.dtensor(_C.FlatTensor.part_of(like_whole, first * dtype.itemsize, shape, dtype))
            for spread, first, shape in zip(self.spreads, self.offsets, shapes, strict=True)
        ]


@dataclass
class _Placed:
    """A parameter that may be in a run."""

    unit: Unit  # the parameter's
    index: int  # its number in the unit's layout
    entry: ShardedParam
    offset: int  # its first byte in the flat shard
    grad_offset: int  # its gradient's first byte in the flat gradient

    def follows(self, other: _Placed) -> bool:
        """Return whether it lies right behind ``other``, as its gradient does."""
        return (
            self.unit is other.unit
            and self.index == other.index + 1
            and self.entry.dtype == other.entry.dtype
            and self.grad_offset - other.grad_offset == self.offset - other.offset
        )


class FlatRuns:
    """The runs of some parameters, and the parameters that are in none.

    Args:
        params: the parameters.
        key: maps a parameter to a value. All parameters of a run have equal values. A parameter
            with the value None is in no run.
    """

    @torch.no_grad()
    def __init__(self, params: Iterable[Any], key: Callable[[Any], Hashable | None]) -> None:
        self.params = list(params)
        owners = owners_of(units_alive())
        # A unit that has no run now may have one later. Each process has the same order of units,
        # because the order of runs changes how a norm is rounded.
        own = list(dict.fromkeys(owners[param] for param in self.params if param in owners))
        keys = {param: key(param) for param in self.params}
        placed = [
            each
            for unit in own
            for each in _placed_in(unit)
            if keys.get(each.entry.sharded) is not None
        ]
        in_runs = {each.entry.sharded for each in placed}
        self.others = [param for param in self.params if param not in in_runs]
        self.runs = [_run_of(each) for each in _divide(placed, keys)]
        self.grads = [run.grad for run in self.runs]
        padded = [run for run in self.runs if run.padding.numel()]
        self._padded_grads = [run.grad for run in padded]
        self._padding = [run.padding for run in padded]

        # Weak references: an optimizer keeps runs, and must not keep a model alive.
        self._units = list(map(weakref.ref, own))
        self._flat = [unit.flat_shard for unit in own]
        self._version = _version_of(own)
        self._placed: list[Any] = [each.entry.sharded for each in placed]
        self._locals: list[torch.Tensor] = [param._local_tensor for param in self._placed]
        # share_memory_() and .data give a tensor other memory.
        self._addresses = _C.addresses_of(self._locals)
        self.clear_padding()  # nobody has written it yet
        for unit in own:
            unit.flat_readers.add(self)

    @property
    def units(self) -> list[Unit]:
        """The units of the parameters that are alive."""
        return [unit for each in self._units if (unit := each()) is not None]

    def free(self) -> None:
        """Let go of the flat memory, which the parameters have left.

        From now on :meth:`are_of` is false.
        """
        for run in self.runs:
            run.whole = torch.empty(0)
        self.grads, self._padded_grads, self._padding = [], [], []
        self._flat, self._locals = [], []

    def clear_padding(self) -> None:
        """Write zeros between the gradients of each run, as a norm over it needs."""
        _C.clear_elements(self._padded_grads, self._padding)

    def are_of(self, params: list[Any]) -> bool:
        """Return whether the same runs would be found for ``params`` now."""
        units = self.units
        return (
            _C.same_objects(params, self.params)
            and _C.have_attribute(units, "flat_shard", self._flat)
            and _version_of(units) == self._version
            and _C.have_attribute(self._placed, "_local_tensor", self._locals)
            and _C.addresses_of(self._locals) == self._addresses
        )


def _version_of(units: list[Unit]) -> int:
    """Return a number that changes with the gradients that lie in the units' flat gradients."""
    return _C.gradients_version([unit.impl for unit in units])


def _placed_in(unit: Unit) -> Iterator[_Placed]:
    """Return the unit's parameters that lie in its flat memory with their gradients, in order."""
    if unit.impl is None or unit.flat_param is not None:
        return
    # Only the C++ side knows which parameters had a gradient: they may have been frozen since.
    shows, places = unit.impl.shows_gradients(), unit.impl.layout.placements
    entries = zip(unit.entries, places, unit.shard_parts, shows, strict=True)
    for index, (entry, place, part, has_gradient) in enumerate(entries):
        if not isinstance(entry, ShardedParam) or not has_gradient:
            continue
        is_in_place = lies_in(entry, part, unit.flat_shard, place.shard_offset)
        if is_in_place and entry.is_gathered and unit.grad_dtype(entry) == entry.dtype:
            yield _Placed(unit, index, entry, place.shard_offset, place.flat_gradient_offset)


def _divide(placed: list[_Placed], keys: dict[Any, Hashable]) -> list[list[_Placed]]:
    runs: list[list[_Placed]] = []
    for each in placed:
        last = runs[-1][-1] if runs else None
        is_alike = last is not None and keys[each.entry.sharded] == keys[last.entry.sharded]
        if last is not None and is_alike and each.follows(last):
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _run_of(placed: list[_Placed]) -> FlatRun:
    first, last = placed[0], placed[-1]
    unit, itemsize, dtype = first.unit, first.entry.dtype.itemsize, first.entry.dtype
    assert unit.impl is not None
    nbytes = last.offset + last.entry.local.nbytes - first.offset
    whole = unit.flat_shard[first.offset : first.offset + nbytes].view(dtype)
    grad = unit.impl.flat_gradient()[first.grad_offset : first.grad_offset + nbytes].view(dtype)
    whole.grad = grad
    entries = [each.entry for each in placed]
    offsets = [(each.offset - first.offset) // itemsize for each in placed]
    ends = [begin + entry.local.numel() for begin, entry in zip(offsets, entries, strict=True)]
    gaps = [
        torch.arange(end, begin, device=whole.device)
        for end, begin in zip(ends, offsets[1:], strict=False)
        if end < begin
    ]
    return FlatRun(
        [entry.sharded for entry in entries],
        [entry.spread for entry in entries],
        offsets,
        whole,
        torch.cat([torch.arange(0, device=whole.device), *gaps]),  # there may be no gaps
    )
