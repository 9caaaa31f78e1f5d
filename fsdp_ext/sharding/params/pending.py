"""Gives users the gradients that backwards without gradient sync have accumulated.

The C++ side accumulates them packed, as the reduction sends them, so users get unsharded copies. A
copy that the user has changed is packed again before anything else reads or adds to the gradient:
the next backward, a reduction, or a change of the C++ side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_ext import _C
from fsdp_ext.sharding.params.entries import Entry, ShardedParam


@dataclass(frozen=True)
class _Copy:
    """A copy of a gradient that the user holds."""

    unit: int  # number of the parameter's unit
    index: int  # the parameter's index in the unit's layout
    param: ShardedParam
    gradient: torch.Tensor  # the copy: a DTensor if the parameter was one before it was sharded
    local: torch.Tensor  # this rank's tensor of it
    version: int  # the result of :meth:`count` when the copy was made

    @staticmethod
    def count(gradient: torch.Tensor, local: torch.Tensor) -> int:
        """Count in-place changes. A DTensor's are not counted in its local tensor."""
        return gradient._version + local._version

    def is_changed(self) -> bool:
        """Return whether a user has written into the copy."""
        return self.count(self.gradient, self.local) != self.version


class PendingGradients:
    """The copies of a root's accumulated gradients that users hold."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def of(
        self, impl: _C.TorchRoot, unit: int, entries: Sequence[Entry]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return accumulated gradients of the unit numbered ``unit``, by sharded parameter.

        ``entries`` are those of its layout in ``impl``.
        """
        parts = impl.accumulated(unit)
        if not parts:
            return {}
        packed = torch.cat(parts, dim=1)
        for index, param in _pending(impl, unit, entries):
            if id(param) not in self._copies:
                local = packed.new_empty(param.shape)
                for whole, chunk in _chunks(impl, unit, index, param, local, packed):
                    torch.div(chunk, impl.pre_scale(unit), out=whole)
                whole = local if param.unsharded is None else param.unsharded.dtensor(local)
                version = _Copy.count(whole, local)
                self._copies[id(param)] = _Copy(unit, index, param, whole, local, version)
        return {
            copy.param.sharded: copy.gradient for copy in self._copies.values() if copy.unit == unit
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle(self, impl: _C.TorchRoot) -> None:
        """Pack again the copies that users have changed, and forget all copies."""
        copies, self._copies = self._copies, {}
        changed: dict[int, list[_Copy]] = {}
        for copy in copies.values():
            if copy.is_changed():
                changed.setdefault(copy.unit, []).append(copy)
        for unit, of_unit in changed.items():
            parts = impl.accumulated(unit)
            if not parts:  # they were dropped since
                continue
            packed = torch.cat(parts, dim=1)
            for copy in of_unit:
                for whole, chunk in _chunks(impl, unit, copy.index, copy.param, copy.local, packed):
                    torch.mul(whole, impl.pre_scale(unit), out=chunk)
            widths = [part.shape[1] for part in parts]
            torch._foreach_copy_(parts, torch.split(packed, widths, dim=1))


def _pending(
    impl: _C.TorchRoot, unit: int, entries: Sequence[Entry]
) -> Iterator[tuple[int, ShardedParam]]:
    """Yield the parameters that have accumulated gradients, and their indices in the layout."""
    has = iter(impl.has_accumulated(unit))
    for index, (entry, place) in enumerate(
        zip(entries, impl.layout_of(unit).placements, strict=True)
    ):
        if isinstance(entry, ShardedParam) and place.grad_offset >= 0 and next(has):
            yield index, entry


def _chunks(
    impl: _C.TorchRoot, unit: int, index: int, param: ShardedParam, whole: Any, packed: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each rank's part of ``whole``, and the same part of ``packed``, in equal shapes."""
    layout = impl.layout_of(unit)
    begin = layout.placements[index].grad_offset
    for rank, part in enumerate(torch.chunk(whole, layout.world_size, param.shard_dim)):
        yield part, packed[rank].narrow(0, begin, part.numel()).view(part.shape)
