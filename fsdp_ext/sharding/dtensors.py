"""The DTensors of a unit: rows of parameters and of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.sharding.ranks import Ranks


@dataclass(frozen=True)
class GradientPlace:
    """Where a sharded gradient lies in the flat gradient.

    Args:
        offset: its first element.
        local_shape: shape of this rank's rows.
        shape: shape of the whole gradient.
    """

    offset: int
    local_shape: torch.Size
    shape: torch.Size


def row_sharded(local: torch.Tensor, ranks: Ranks, shape: torch.Size) -> DTensor:
    """Return a DTensor of ``shape`` of which this rank has the rows ``local``."""
    return DTensor.from_local(
        local,
        ranks.mesh,
        ranks.placements,
        run_check=False,
        shape=shape,
        stride=_contiguous_stride(shape),
    )


def gradient_maker(
    ranks: Ranks, places: Sequence[GradientPlace]
) -> Callable[[torch.Tensor], list[DTensor]]:
    """Return a function that makes the sharded gradients at ``places`` of a flat gradient.

    The C++ unit keeps the function, so it refers to nothing that refers to the unit.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(flat: torch.Tensor) -> list[DTensor]:
        return [
            row_sharded(
                _C.FlatTensor.part_of(
                    flat, place.offset * flat.itemsize, place.local_shape, flat.dtype
                ),
                ranks,
                place.shape,
            )
            for place in places
        ]

    return make


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride))
