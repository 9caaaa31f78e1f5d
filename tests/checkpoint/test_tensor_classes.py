"""A tensor in a wrapper is saved as a plain one if it has the wrapper's shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extensions import HalfWeight, Int8Weight
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ext import checkpoint, fully_shard


def trained(wrap: Callable[[Tensor], Tensor], steps: int, *, shard: bool = True) -> Any:
    """Return a model of three rows a rank at most, and its optimizer."""
    torch.manual_seed(steps)
    model: Any = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3))
    for layer in model:
        is_trained = wrap is not Int8Weight.of
        layer.weight = nn.Parameter(wrap(layer.weight.detach()), requires_grad=is_trained)
        if shard:
            fully_shard(layer)
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(made: Any) -> list[Tensor]:
    """Return the whole weights and states."""
    model, optimizer = made
    tensors = [*model.parameters()]
    tensors += [state["exp_avg"] for state in optimizer.state.values()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return [each._data if isinstance(each, HalfWeight) else each.detach() for each in whole]


def plain(weight: Tensor) -> Tensor:
    return weight


def _exchange(place: Path) -> None:
    saved = trained(HalfWeight, 2)
    checkpoint.save(place, *saved)
    for other in (trained(HalfWeight, 1), trained(plain, 1), trained(plain, 1, shard=False)):
        checkpoint.load(place, *other)
        for got, expected in zip(values(other), values(saved), strict=True):
            assert torch.equal(got, expected)
    checkpoint.save(place, *trained(plain, 3))
    checkpoint.load(place, *saved)
    for got, expected in zip(values(saved), values(trained(plain, 3)), strict=True):
        assert torch.equal(got, expected)


def test_wrapped_and_plain_weights_load_each_other(tmp_path: Path) -> None:
    run_ranks(_exchange, 2, tmp_path)


def _refuse(place: Path) -> None:
    model, _ = trained(Int8Weight.of, 0)
    with pytest.raises(TypeError, match=r"'0.weight' is a Int8Weight .* Use torch\.distributed"):
        checkpoint.save(place, model)
    assert not list(place.iterdir())


def test_numbers_with_scales_are_refused(tmp_path: Path) -> None:
    run_ranks(_refuse, 2, tmp_path)
