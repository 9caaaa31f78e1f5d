"""A model whose units compute for a given time, and its profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_ext
from fsdp_ext import fully_shard

WIDTH = 256
LAYERS = 6
UNIT = WIDTH * WIDTH * 4  # bytes


class Pause(nn.Module):
    """A layer that sleeps in forward and in backward, which leaves the cores to others."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y = x @ self.weight
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds))
        return y


def make(
    transport: Any = None, compute: float = 0.004, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Pause(compute) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh, transport=transport)
    options.setdefault("bucket_bytes", 0)
    return fully_shard(model, mesh=mesh, transport=transport, **options)


def train(model: Any, steps: int, before: Callable[[int], Any] = lambda step: None) -> None:
    for step in range(steps):
        before(step)
        model(torch.ones(1, WIDTH)).sum().backward()


def profiled(model: Any, before: Callable[[int], Any] = lambda step: None) -> Any:
    train(model, 3)
    with fsdp_ext.profile(model) as prof:
        train(model, 4, before)
    return prof


def check_sums(prof: Any) -> None:
    """Check that the reported parts add up, in total and for each step."""
    summary = prof.summary()
    parts = (summary.compute, summary.exposed, summary.optimizer, summary.other)
    assert sum(parts) == pytest.approx(summary.step)
    assert sum(summary.causes.values()) == pytest.approx(summary.exposed, abs=1e-9)
    for rows in (prof.rows(), prof.rows(by="unit")):
        exposed = summary.exposed + summary.optimizer
        assert sum(row.exposed for row in rows) == pytest.approx(exposed, abs=1e-9)
        on_wire = [row.wire for row in rows if row.operation != "optimizer"]
        assert sum(on_wire) == pytest.approx(summary.wire)
    for iteration in prof.iterations:
        parts = (iteration.compute, iteration.exposed, iteration.optimizer, iteration.other)
        assert sum(parts) == pytest.approx(iteration.step)
        assert all(part >= -1e-9 for part in parts)
