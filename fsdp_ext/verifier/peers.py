"""The exchanges of ``verify`` with other ranks, outside of the steps that it checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ext.verifier.turns import Turns


class Peers(ABC):
    """All ranks, in order.

    Args:
        rank: this rank.
        size: how many there are.
        may_differ: whether ranks may use different units in a step.
    """

    def __init__(self, rank: int, size: int, may_differ: bool) -> None:
        self.rank = rank
        self.size = size
        self.may_differ = may_differ

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks. They have to be picklable."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have one shape and dtype."""


class GroupPeers(Peers):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), may_differ=True)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        own = tensor.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return found


class PeersInTurns(Peers):
    """Ranks that are threads: Note [turns] in ``turns.py``.

    Both of their lanes share one group, so they may not differ: Note [inline groups].
    """

    def __init__(self, rank: int, turns: Turns) -> None:
        super().__init__(rank, turns.size, may_differ=False)
        self._turns = turns

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self._turns.meet(self.rank, "an exchange of verify", value)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        return self._turns.meet(self.rank, "a gather of verify", tensor.clone())
