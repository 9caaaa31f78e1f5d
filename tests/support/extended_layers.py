"""Layers of tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from support.extended_models import reshard
from support.extensions import HalfWeight
from support.parity import assert_same


class Layers(nn.Module):
    """Layers without biases, whose inputs need no gradient in the first one."""

    def __init__(self, make: Callable[[Tensor], Tensor], rows: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for columns, size in ((8, rows), (rows, 8), (8, rows)):
            layer = nn.Linear(columns, size, bias=False)
            layer.weight = nn.Parameter(make(layer.weight.detach()))
            self.layers.append(layer)
        self.head = nn.Linear(rows, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def plain_of(tensor: Tensor) -> Tensor:
    while isinstance(tensor, TwoTensor):
        tensor = tensor.b
    return tensor


def contents(tensor: Tensor | None) -> list[Tensor]:
    if tensor is None:
        return []
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if isinstance(local, TwoTensor):
        return [local.a.clone(), local.b.clone()]
    return [(local._data if isinstance(local, HalfWeight) else local).clone()]


def train(model: Any, micro_batches: int = 1) -> list[Tensor]:
    """Return losses, gradients and parameters of three steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen = []
    for step in range(3):
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            generator = torch.Generator().manual_seed(10 * step + micro_batch + 5 * dist.get_rank())
            loss = model(torch.randn(4, 8, generator=generator)).float().square().sum()
            loss.backward()
            seen.append(plain_of(loss.detach()).clone())
        for parameter in model.parameters():
            seen += contents(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reshard(model)
        for parameter in model.parameters():
            seen += contents(parameter)
    return seen


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) > 10
    assert_same("the other", theirs, ours)
