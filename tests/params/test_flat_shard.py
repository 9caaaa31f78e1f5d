"""The flat shard and the flat gradient are two tensors that custom optimizers can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import Stack
from torch import nn

from fsdp_ext import MixedPrecisionPolicy, fully_shard


def _sharded(model: Any) -> Any:
    for unit in model.units():
        fully_shard(unit)
    return fully_shard(model)


def _descends_as_sgd() -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(_sharded(Stack()))
    ours, reference = models
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    (x,), _ = ours.batch(torch.Generator().manual_seed(1))
    for _ in range(3):
        for model in models:
            model.zero_grad()
            model.loss(model(x)).backward()
        sgd.step()
        for module in [*ours.blocks, ours]:
            shard, gradient = module.flat_shard()
            assert shard.shape == gradient.shape
            shard.add_(gradient, alpha=-0.1)
    for have, want in zip(ours.parameters(), reference.parameters(), strict=True):
        assert have._local_tensor.equal(want._local_tensor)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_on_the_flat_shards_is_a_step_of_all_parameters(world_size: int) -> None:
    run_ranks(_descends_as_sgd, world_size)


def _pads_with_zeros() -> None:
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    model: Any = fully_shard(nn.Linear(3, 5))
    x = torch.ones(1, 3)
    with torch.no_grad():
        model(x)
    shard, gradient = model.flat_shard()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a reduction adds to it element by element
    model(x).sum().backward()
    shard.fill_(1)
    for parameter in model.parameters():
        parameter._local_tensor.detach().zero_()
    assert shard.any()
    assert gradient[shard.bool()].eq(0).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_padding_of_a_flat_gradient_is_zero(world_size: int) -> None:
    run_ranks(_pads_with_zeros, world_size)


def _refuses() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="run a forward before"):
        model.flat_shard()
    model(torch.ones(1, 4))
    model.flat_shard()
    model.reshard()
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"all trained, but .* the frozen parameters \[.bias.\]"):
        model.flat_shard()


def _pads_otherwise() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    padded: Any = fully_shard(nn.Linear(6, 6), mp_policy=policy)
    padded(torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"reduced in torch.bfloat16, which needs more padding"):
        padded.flat_shard()
    alike: Any = fully_shard(nn.Linear(16, 16), mp_policy=policy)
    alike(torch.ones(1, 16))
    shard, gradient = alike.flat_shard()
    assert shard.shape == gradient.shape


def test_gradients_that_lie_otherwise_are_no_flat_gradient() -> None:
    run_ranks(_pads_otherwise, 2)


def test_units_that_have_no_such_two_tensors_say_so() -> None:
    run_ranks(_refuses, 1)
