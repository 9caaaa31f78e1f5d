"""Parameters are freed in time, and reading a freed one raises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.parity import SYSTEM, load_system
from torch import Tensor, nn

from fsdp_ext import fully_shard

READS: list[Callable[[Tensor], Any]] = [
    repr,
    str,
    lambda weight: weight.tolist(),
    lambda weight: weight[0, 0].item(),
    lambda weight: weight[1:].sum(),
    lambda weight: weight @ weight,
    lambda weight: torch.nn.functional.linear(torch.ones(1, 64), weight),
]


def _freed(shard: Callable[..., Any], width: int) -> tuple[Any, Tensor]:
    """Return a model and a weight of it that was kept in forward and is freed now."""
    model: Any = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    kept: list[Tensor] = []
    shard(model[0])
    shard(model)
    model[0].register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    model(torch.ones(1, width))
    return model, kept[0]


def _reads(system: str) -> None:
    model, weight = _freed(load_system(system).fully_shard, 64)
    assert type(weight) is nn.Parameter
    for read in READS:
        with pytest.raises(RuntimeError):
            read(weight)
    model(torch.ones(1, 64)).sum().backward()  # it has memory again while its module runs


@pytest.mark.parametrize("system", ["fsdp2", SYSTEM])
def test_printing_or_indexing_a_freed_parameter_raises(system: str) -> None:
    run_ranks(_reads, 2, system)


# torch 2.11 has no storage that raises what it is told to.
REFUSES = torch.__version__ >= "2.12"


def _computes_with_freed() -> list[str]:
    _, weight = _freed(fully_shard, 8)
    messages = []
    for read in (repr, torch.abs, torch.isfinite, lambda w: w.detach().add_(1), lambda w: w @ w):
        with pytest.raises(RuntimeError) as caught:
            read(weight)
        messages.append(str(caught.value))
    return messages


@pytest.mark.skipif(not REFUSES, reason="torch 2.11 crashes here, with FSDP2, too")
def test_every_read_of_a_freed_parameter_names_its_unit() -> None:
    for messages in run_ranks(_computes_with_freed, 2):
        for message in messages:
            assert message.startswith(
                "An unsharded parameter of unit '0' was read while it is freed."
            )


def _replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wholes = [weakref.ref(param) for param in model.parameters()]
    gc.disable()
    try:
        fully_shard(model[0])
        fully_shard(model)
        assert not any(whole() is not None for whole in wholes)
    finally:
        gc.enable()


def test_whole_parameters_are_freed_as_soon_as_they_are_sharded() -> None:
    run_ranks(_replaced, 2)
