"""The exchanges of ``verify`` with other ranks, outside of the steps that it checks.

They use the default process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def exchange(value: Any) -> list[Any]:
    """Return the values of all ranks, in order. They have to be picklable."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in order. They have one shape and dtype."""
    own = tensor.contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found
