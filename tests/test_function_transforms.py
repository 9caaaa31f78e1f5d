"""The transforms of ``torch.func`` give a sharded model the numbers that they give under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.parity import whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from fsdp_ext import fully_shard

TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](x)[0],
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "vmap": lambda model, x: vmap(model)(x),
}
FREEZES_BEFORE, STEPS = 2, 4  # freezing rebuilds the schedule inside the transform


def make(system: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        system(layer)
    return system(model)


def results(system: Callable[..., Any], transform: str) -> list[Tensor]:
    """Return what the transform gives in each step, and how the model trains meanwhile."""
    model = make(system)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        if step == FREEZES_BEFORE:
            model[2].weight.requires_grad_(False)
            if system is torch_fully_shard:  # it raises if it sees that inside of a transform
                model(x)
        seen.append(TRANSFORMS[transform](model, x).detach())
        model(x).square().mean().backward()
        seen += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *map(whole, model.parameters())]


def _transformed(transform: str) -> None:
    ours = results(fully_shard, transform)
    theirs = results(torch_fully_shard, transform)
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_over_a_model_are_those_of_fsdp2(transform: str) -> None:
    run_ranks(_transformed, 2, transform)


def _vmap_inside_of_grad() -> None:
    x = torch.ones(3, 4)
    model = make(fully_shard)
    with pytest.raises(
        RuntimeError, match=r"unit '2' was read while it is freed.*call unshard\(\)"
    ):
        grad(lambda x: vmap(model)(x).square().sum())(x)
    expected = TRANSFORMS["grad"](model, x)
    for module in (model, model[0], model[2]):
        module.set_reshard_after_forward(False)
    assert torch.equal(grad(lambda x: vmap(model)(x).square().sum())(x), expected)


def test_grad_of_vmap_needs_units_that_stay_unsharded() -> None:
    run_ranks(_vmap_inside_of_grad, 2)


def _parameters_as_arguments() -> None:
    x = torch.ones(3, 4)
    for system in (torch_fully_shard, fully_shard):
        model = make(system)
        own = model(x)
        own.sum().backward()
        others = {name: 2 * p.detach() for name, p in model.named_parameters()}
        if system is torch_fully_shard:  # it runs with its own parameters
            assert torch.equal(functional_call(model, others, (x,)), own)
        else:
            with pytest.raises(RuntimeError, match="was replaced after fully_shard"):
                functional_call(model, others, (x,))


def test_other_parameters_are_refused_and_not_ignored_as_by_fsdp2() -> None:
    run_ranks(_parameters_as_arguments, 2)
