"""Moves gradients that are not reduced yet from one C++ side of a root to the next.

Backwards without gradient sync accumulate gradients in the C++ side. When parameters are unfrozen,
replaced or converted, the C++ side is made anew, and the new one takes over the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.sharding.params.entries import Entry, ShardedParam
from fsdp_ext.sharding.params.flat_parameter import is_flat


@dataclass(frozen=True)
class Unreduced:
    """Accumulated gradients of one parameter."""

    param: ShardedParam
    # One row for each rank, with the gradient of that rank's part of the parameter.
    chunks: torch.Tensor
    scale: float  # the factor by which the gradients were multiplied
    is_used: bool  # whether this rank has a packed gradient; otherwise the chunks are zero
    # Whether ``.grad`` has it instead: Note [shown gradients] in csrc/torch/shown_gradients.h.
    is_shown: bool
    put_aside: torch.Tensor | None  # the sharded gradient that ``.grad`` had before


def is_unreduced(param: torch.Tensor) -> bool:
    """Return whether ``param.grad`` is unsharded, although the parameter is sharded."""
    if param.grad is None:
        return False
    if is_flat(param):
        return param.grad.shape != param.shape
    return isinstance(param, DTensor) and not isinstance(param.grad, DTensor)


@torch.inference_mode(False)
@torch.no_grad()
def take(impl: _C.TorchRoot, placed: Sequence[Sequence[Entry]]) -> list[Unreduced]:
    """Return copies of the gradients that ``impl`` has not reduced yet.

    Until the next call, a frozen parameter with such gradients counts as trained, so that it takes
    part in the reduction: Note [frozen parameters] in csrc/torch/torch_unit.h.
    ``placed`` has the entries of each unit's layout in ``impl``.
    """
    found = []
    for number, entries in enumerate(placed):
        awaits = impl.awaits_reduction(number)
        parts = impl.accumulated(number)
        used = iter(impl.has_accumulated(number))
        shown = iter(impl.shown(number))
        layout = impl.layout_of(number)
        whole = torch.cat(parts, dim=1) if parts else None
        for entry, place in zip(entries, layout.placements, strict=True):
            if not isinstance(entry, ShardedParam):
                continue
            is_trained = place.grad_offset >= 0
            entry.awaits_reduction = awaits and is_trained
            is_used = is_trained and next(used)
            is_shown, put_aside = next(shown, (False, None)) if is_trained else (False, None)
            if entry.awaits_reduction:
                chunks = (
                    torch.zeros(layout.world_size, place.chunk_numel)
                    if whole is None
                    else whole.narrow(1, place.grad_offset, place.chunk_numel)
                )
                scale = impl.pre_scale(number)
                found.append(Unreduced(entry, chunks, scale, is_used, is_shown, put_aside))
    return found


@torch.inference_mode(False)
@torch.no_grad()
def put(
    impl: _C.TorchRoot, placed: Sequence[Sequence[Entry]], unreduced: Sequence[Unreduced]
) -> None:
    """Let ``impl``, which has accumulated nothing, reduce what :func:`take` took from another one.

    ``placed`` has the entries of each unit's layout in ``impl``.
    """
    if not unreduced:
        return
    impl.form_buckets()
    by_param = {id(each.param): each for each in unreduced}
    for number, entries in enumerate(placed):
        layout = impl.layout_of(number)
        trained = [
            (by_param.get(id(entry)), place)
            for entry, place in zip(entries, layout.placements, strict=True)
            if place.grad_offset >= 0
        ]
        if not any(each for each, _ in trained):
            continue
        for index, (each, _) in enumerate(trained):
            if each is not None and each.is_shown:
                impl.adopt_shown(number, index, each.put_aside)
        parts = impl.set_accumulated(
            number, [each is not None and each.is_used for each, _ in trained]
        )
        if not parts:
            continue
        whole = parts[0].new_zeros(layout.world_size, layout.grad_numel)
        for each, place in trained:
            if each is not None:
                chunks = whole.narrow(1, place.grad_offset, place.chunk_numel)
                chunks.copy_(each.chunks)
                if each.scale != impl.pre_scale(number):
                    chunks.mul_(impl.pre_scale(number) / each.scale)
        torch._foreach_copy_(parts, torch.split(whole, [part.shape[1] for part in parts], dim=1))
