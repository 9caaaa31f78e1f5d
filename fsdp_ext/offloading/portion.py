"""Optimizer states that are stepped together: Note [offloaded states]."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext._util.errors import UnsupportedError

_ALIGNMENT = 64  # bytes, of each state in the memory of a portion


@dataclass
class Portion:
    """Parameters that are stepped together, and where their states are.

    The code of each step has no Python loop over parameters: ``map`` and ``deque`` loop in C.

    Args:
        by_group: the parameters, for each group of the optimizer.
        is_sharded: whether their states are offloaded.
    """

    by_group: list[list[nn.Parameter]]
    is_sharded: bool
    # The dict of each parameter with states, and the total number of their entries.
    dicts: list[dict[str, Any]] = field(default_factory=list)
    entries: int = 0
    # For each offloaded state: its dict, its name in the dict, and its two tensors.
    homes: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    on_host: list[torch.Tensor] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    host: torch.Tensor | None = None  # the memory of them all
    device: torch.Tensor | None = None  # a part of a staging tensor

    def params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(self.by_group)

    @property
    def nbytes(self) -> int:
        return 0 if self.host is None else self.host.numel()

    def has_only(self, states: dict[Any, Any], tensors: list[torch.Tensor]) -> bool:
        """Return whether the optimizer has exactly these dicts and tensors for the parameters.

        Args:
            states: the optimizer's.
            tensors: ``on_host`` or ``on_device``.
        """
        dicts = list(filter(None, map(states.get, self.params())))
        return (
            len(dicts) == len(self.dicts)
            and all_same(iter(dicts), self.dicts)
            and sum(map(len, dicts)) == self.entries
            and len(tensors) == len(self.homes)
            and all_same(map(dict.get, self.homes, self.names), tensors)
        )

    def put(self, tensors: list[torch.Tensor]) -> None:
        """Let the optimizer have ``on_host`` or ``on_device`` as states."""
        deque(map(operator.setitem, self.homes, self.names, tensors), maxlen=0)

    def settle(self, states: dict[Any, Any]) -> None:
        """Move the states that the optimizer has now into one tensor on the host."""
        self.dicts = list(filter(None, map(states.get, self.params())))
        self.entries = sum(map(len, self.dicts))
        found = [
            (values, name, value)
            for values in self.dicts
            for name, value in values.items()
            if is_offloaded(value)
        ]
        for _, name, value in found:
            if type(local_of(value)) is not torch.Tensor:
                raise UnsupportedError(
                    f"offload_optimizer got an optimizer whose state '{name}' is a "
                    f"{type(local_of(value)).__name__}. Use one whose states are plain tensors."
                )
        self.homes = [values for values, _, _ in found]
        self.names = [name for _, name, _ in found]
        old = [value for _, _, value in found]
        sizes = [-(-local_of(value).nbytes // _ALIGNMENT) * _ALIGNMENT for value in old]
        pins = torch.cuda.is_available()
        self.host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pins)
        self.on_host = self._views(self.host, old)
        self.leave()
        for new, value in zip(self.on_host, old, strict=True):
            local_of(new).copy_(local_of(value))
        self.put(self.on_host)

    def leave(self) -> None:
        """Forget the tensors that place() makes."""
        self.on_device = []
        self.device = None

    def place(self, staging: torch.Tensor) -> None:
        """Make the tensors that the optimizer has while it steps this portion."""
        self.device = staging[: self.nbytes]
        self.on_device = self._views(self.device, self.on_host)

    def _views(self, memory: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        views, first = [], 0
        for value in like:
            local = local_of(value)
            part = _C.FlatTensor.part_of(memory, first, local.shape, local.dtype)
            views.append(_over(part, value))
            first += -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        return views


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _over(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is spread as ``like``, with ``local`` as this rank's part."""
    if not isinstance(like, DTensor):
        return local
    # from_local would move it to the device of the mesh
    return cast(torch.Tensor, DTensor(local, like._spec, requires_grad=False))  # type: ignore[no-untyped-call]


def is_offloaded(value: object) -> bool:
    """Return whether a state is kept on the host. Scalars and empty shards are not worth a copy."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and local_of(value).numel() > 0


def all_same(left: Iterator[Any], right: list[Any]) -> bool:
    return all(map(operator.is_, left, right))
