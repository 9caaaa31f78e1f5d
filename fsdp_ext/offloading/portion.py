"""Optimizer states that are stepped together: Note [offloaded states]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_ext import _C
from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext.optim.state_entries import StateEntries, local_of, over

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")  # not on a default device
_ALIGNMENT = 64  # bytes, of each state in the memory of a portion


@dataclass
class Portion:
    """Parameters that are stepped together, and where their states are."""

    by_group: list[list[nn.Parameter]]  # for each group of the optimizer
    is_sharded: bool  # whether their states are offloaded
    on_host: list[torch.Tensor] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    host: torch.Tensor = _NOTHING  # the memory of them all
    device: torch.Tensor = _NOTHING  # a part of a staging tensor

    def __post_init__(self) -> None:
        # The optimizer has no states yet. Later, these entries note the offloaded ones.
        self.entries = StateEntries({}, self.params(), is_offloaded)

    def params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(self.by_group)

    @property
    def nbytes(self) -> int:
        return self.host.numel()

    def settle(self, states: dict[Any, Any]) -> None:
        """Move the states that the optimizer has now into one tensor on the host."""
        self.entries = StateEntries(states, self.params(), is_offloaded)
        old = self.entries.values()
        for name, value in zip(self.entries.names, old, strict=True):
            if type(local_of(value)) is not torch.Tensor:
                raise UnsupportedError(
                    f"offload_optimizer got an optimizer whose state '{name}' is a "
                    f"{type(local_of(value)).__name__}. Use one whose states are plain tensors."
                )
        sizes = [-(-local_of(value).nbytes // _ALIGNMENT) * _ALIGNMENT for value in old]
        pins = torch.cuda.is_available()
        self.host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pins)
        self.on_host = self._views(self.host, old)
        self.leave()
        for new, value in zip(self.on_host, old, strict=True):
            local_of(new).copy_(local_of(value))
        self.entries.put(self.on_host)

    def leave(self) -> None:
        """Forget the tensors that place() makes."""
        self.on_device = []
        self.device = _NOTHING

    def place(self, staging: torch.Tensor) -> None:
        """Make the tensors that the optimizer has while it steps this portion."""
        self.device = staging[: self.nbytes]
        self.on_device = self._views(self.device, self.on_host)

    def _views(self, memory: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        views, first = [], 0
        for value in like:
            local = local_of(value)
            part = _C.FlatTensor.part_of(memory, first, local.shape, local.dtype)
            views.append(over(part, value))
            first += -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        return views


def is_offloaded(value: object) -> bool:
    """Return whether a state is kept on the host. Scalars and empty shards are not worth a copy."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and local_of(value).numel() > 0
