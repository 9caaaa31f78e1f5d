"""A forked child that uses its parent's sharded model gets a sentence, and its parent trains on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forked import error_in_child
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import fully_shard
from fsdp_ext.comm import lanes


def _step(model: nn.Module) -> float:
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return float(loss.detach())


def _error_in_child(action: Callable[[], object]) -> str:
    """Return what `action` raises in a forked child, which then frees what it has."""

    def act() -> None:
        try:
            action()
        finally:
            lanes._lanes.clear()  # as at the end of a process
            gc.collect()

    return error_in_child(act)


def _use_in_child(transport: str, is_trained: bool) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in [*model, model]:
        fully_shard(module, transport=transport)
    first = _step(model) if is_trained else None
    messages = (
        _error_in_child(lambda: model(torch.ones(2, 4))),
        _error_in_child(lambda: _step(model)),
    )
    assert _step(model) == (first or _step(model))
    return messages


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_sharded_model_in_a_forked_child_raises(transport: str, is_trained: bool) -> None:
    for messages in run_ranks(_use_in_child, 2, transport, is_trained, timeout=60.0):
        for message in messages:
            assert "rocess was forked off" in message
            assert message.endswith(
                "Use the model only in the process that sharded it, or start the other process "
                "with 'spawn' (in a DataLoader, multiprocessing_context='spawn')."
            )


def _write_in_child(transport: str) -> bool:
    model = fully_shard(nn.Linear(4, 4), transport=transport)
    state: dict[str, Any] = model.state_dict()
    before = state["weight"].to_local().clone()
    _error_in_child(lambda: torch.nn.init.zeros_(state["weight"].to_local()))
    return torch.equal(state["weight"].to_local(), before)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_forked_child_shares_the_shards_that_are_in_shared_memory(transport: str) -> None:
    kept = transport == "process_group"
    assert run_ranks(_write_in_child, 2, transport) == [kept, kept]
