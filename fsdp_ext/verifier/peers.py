"""The exchanges of ``verify`` with other ranks, outside of the steps that it checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """The ranks of the default process group, in order. Each thread that is a rank has its own.

    Args:
        may_differ: whether ranks may use different units in a step. False if ranks are threads:
            both lanes then share one group (Note [inline groups]).
    """

    may_differ: bool = True

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size()

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks. They have to be picklable."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape and dtype."""
        own = tensor.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return found
