"""Checkpoints that older versions have written can be loaded.

``data/format-1`` was written by :func:`save_example` on two ranks, at version 0.1.0 of fsdp_ext.
It pins what an index, a file's header and its tree are in format 1, and the names of states. If a
test fails, either let the code read the old form, too, or raise ``saving.FORMAT``, and let a
release note say so. A new format needs a directory of its own here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import assert_same
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import checkpoint, fully_shard
from fsdp_ext.checkpoint import cli

DATA = Path(__file__).parent / "data"
FORMATS = sorted(path.name for path in DATA.iterdir())


class Example(nn.Module):
    """A model with rows that two ranks cannot share equally, buffers, tied weights and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "array": np.array([1, 2])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] + int(state["array"].sum())


def example(*, shard: bool, is_filled: bool) -> tuple[Example, torch.optim.Optimizer]:
    """Return a model and an optimizer whose states are exact functions of the weights."""
    model = Example()
    if is_filled:
        model.calls = 7
        for number, tensor in enumerate(model.state_dict().values()):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
    if shard:
        fully_shard(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    # Such a step halves the gradients, and leaves the weights as they are.
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others}], lr=0, betas=(0.5, 0.5), weight_decay=0
    )
    if is_filled:
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
    return model, optimizer


def extra_of(rank: int) -> Any:
    return {
        "rank": rank,
        "nested": [None, True, 1.5, float("inf"), ("a", b"\x00b", torch.bfloat16)],
        "counter": Counter({3: 2}),
        "tensor": torch.arange(3) + rank,
        "array": np.arange(2.0),
    }


def save_example(directory: Path) -> None:
    """Write the data of a format. All of two ranks call it."""
    checkpoint.save(directory, *example(shard=True, is_filled=True), extra_of(dist.get_rank()))


def assert_loads(directory: Path, *, shard: bool) -> None:
    """Load the data of a format, and compare it with what was saved."""
    model, optimizer = example(shard=shard, is_filled=False)
    extra = checkpoint.load(directory, model, optimizer)
    expected, expected_optimizer = example(shard=False, is_filled=True)
    expected.calls += 3
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert_same(optimizer.state_dict(), expected_optimizer.state_dict())
    assert_same(extra, extra_of(dist.get_rank() if dist.is_initialized() else 0))


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_one_process_loads_it(name: str) -> None:
    assert_loads(DATA / name, shard=False)


def _loads(directory: Path) -> None:
    assert_loads(directory, shard=True)


@pytest.mark.parametrize("name", FORMATS)
def test_two_ranks_load_it(name: str) -> None:
    run_ranks(_loads, 2, DATA / name)


@pytest.mark.parametrize("name", FORMATS)
def test_its_data_is_as_it_was_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("inspect", [str(DATA / name), "--verify"]) == 0
    assert "are as they were written" in capsys.readouterr().out
    index = json.loads(next((DATA / name).glob("*/index.json")).read_text())
    assert name == f"format-{index['content']['format']}"
