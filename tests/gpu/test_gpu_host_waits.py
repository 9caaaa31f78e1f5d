"""The host does not wait for the GPU where an optimizer steps or gradients are clipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import Stack

import fsdp_ext
from fsdp_ext import fully_shard
from fsdp_ext.optim import AdamW

STEPS = 3


@contextmanager
def _no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _train(attached: dict[str, Any] | None) -> None:
    model: Any = Stack().cuda()
    for unit in model.units():
        fully_shard(unit)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    if attached is not None:
        optimizer.attach(model, **attached)
    (x,), _ = model.batch(torch.Generator().manual_seed(0))
    x = x.cuda()

    def step() -> None:
        model.loss(model(x)).backward()
        if attached is None:
            fsdp_ext.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    step()  # finds runs, and makes states
    with _no_waits():
        for _ in range(STEPS):
            step()


def _no_step_waits() -> None:
    _train(None)
    for attached in (
        {},
        {"max_norm": 0.1},
        {"max_norm": 0.1, "clip_by": "unit", "skip_nonfinite": True},
    ):
        _train(attached)


@pytest.mark.timeout(120)
def test_steps_and_clipping_do_not_wait_for_the_gpu() -> None:
    run_ranks(_no_step_waits, 1, timeout=100.0, device="cuda")
