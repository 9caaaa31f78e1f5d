"""PyTorch's collectives of one tensor, by the names that the installed version does not deprecate.

torch 2.13 named them ``..._single``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Gather the inputs of all ranks into ``output``. Return the work if it is asynchronous."""
    return _all_gather(output, input, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's part of the ranks' inputs into ``output``."""
    _reduce_scatter(output, input, group=group)
