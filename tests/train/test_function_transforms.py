"""The transforms of ``torch.func`` give a sharded model the numbers that they give under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.parity import whole
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from fsdp_ext import fully_shard

TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](x)[0],
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "vmap": lambda model, x: vmap(model)(x),
}
# PyTorch 2.11 finds the empty storage before anybody can say whose it is.
FREED = r"unit '[02]' was read while it is freed.*call unshard\(\)|for storage of size 0"
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


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="FSDP2 of this PyTorch refuses transforms that differentiate"
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_over_a_model_are_those_of_fsdp2(transform: str) -> None:
    run_ranks(_transformed, 2, transform)


def gradients_behind(system: Callable[..., Any], transform: str) -> list[tuple[str, Tensor | None]]:
    """Return what users see of a backward's gradients after a transform."""
    model, x = make(system), torch.ones(3, 4)
    model(x).square().mean().backward()
    TRANSFORMS[transform](model, x)
    return [
        (type(param).__name__, None if param.grad is None else whole(param.grad))
        for param in model.parameters()
    ]


def _gradients_behind(transform: str) -> None:
    ours = gradients_behind(fully_shard, transform)
    for mine, theirs in zip(ours, gradients_behind(torch_fully_shard, transform), strict=True):
        assert mine[0] == theirs[0]
        assert str(mine[1]) == str(theirs[1])


@pytest.mark.skipif(torch.__version__ < "2.13", reason="as above")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_leave_gradients_where_fsdp2_does(transform: str) -> None:
    run_ranks(_gradients_behind, 2, transform)


SECOND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hessian": lambda f, x: hessian(f)(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (torch.ones_like(x),))[1],
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).square().sum())(x),
}


def _derivatives_of_derivatives() -> None:
    plain, sharded = make(lambda module: module), make(fully_shard)
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    for name, transform in SECOND.items():
        expected = transform(lambda x: plain(x).square().sum(), x)
        got = transform(lambda x: sharded(x).square().sum(), x)
        assert torch.allclose(got, expected, atol=1e-6), name
        assert expected.abs().max() > 1e-3


def test_second_derivatives_are_those_of_the_unsharded_model() -> None:
    run_ranks(_derivatives_of_derivatives, 2)


THROUGH: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](x)[0],
    "vmap of grad": lambda model, x: vmap(grad(lambda x: model(x).square().sum()))(x),
    "value of vjp": lambda model, x: vjp(model, x)[0],
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
    "vmap": lambda model, x: vmap(model)(x),
}
HIDDEN = ("value of vjp", "jvp", "vmap")  # whose outputs no unit's hook sees


def _backward_through(keeps: bool) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for name, transform in THROUGH.items():
        plain, sharded = make(lambda module: module), make(fully_shard)
        if keeps:
            for module in (sharded, sharded[0], sharded[2]):
                module.set_reshard_after_forward(False)
        transform(plain, x).square().sum().backward()
        loss = transform(sharded, x).square().sum()
        if name in HIDDEN and not keeps:
            with pytest.raises(RuntimeError, match=FREED):
                loss.backward()
            continue
        loss.backward()
        for mine, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                assert torch.allclose(whole(mine.grad), expected.grad, atol=1e-5), name


@pytest.mark.parametrize("keeps", [False, True])
def test_backward_goes_through_what_a_transform_returns(keeps: bool) -> None:
    run_ranks(_backward_through, 2, keeps)


def _tangent() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tangents = []
    for system in (lambda module: module, fully_shard):
        with forward_ad.dual_level():
            output = make(system)(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert torch.allclose(*tangents)


def test_forward_mode_autograd_gives_the_tangent() -> None:
    run_ranks(_tangent, 2)


def _vmap_inside_of_grad() -> None:
    x = torch.ones(3, 4)
    model = make(fully_shard)
    with pytest.raises(RuntimeError, match=FREED):
        grad(lambda x: vmap(model)(x).square().sum())(x)
    expected = TRANSFORMS["grad"](model, x)
    for module in (model, model[0], model[2]):
        module.set_reshard_after_forward(False)
    assert torch.equal(grad(lambda x: vmap(model)(x).square().sum())(x), expected)


def test_grad_of_vmap_needs_units_that_stay_unsharded() -> None:
    run_ranks(_vmap_inside_of_grad, 2)


def _own_parameters() -> None:
    x = torch.ones(2, 4)
    grads = []
    for system in (fully_shard, torch_fully_shard):
        model = make(system)
        for _ in range(2):
            functional_call(model, dict(model.named_parameters()), (x,)).square().sum().backward()
        grads.append([whole(p.grad) for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_model_may_be_called_with_its_own_parameters() -> None:
    run_ranks(_own_parameters, 2)


def weight_in_forward(layer: nn.Module) -> list[Tensor]:
    """Return a list that gets the layer's weight in each forward."""
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    return seen


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
            unsharded = weight_in_forward(model[0])
            model(x).sum().backward()
            for name in others:
                refused = rf"parameter '{name}' of unit '.*' was replaced after fully_shard"
                with pytest.raises(RuntimeError, match=refused):
                    functional_call(model, {name: others[name]}, (x,))
                # Under PyTorch 2.11 only some operators check the size of a freed storage. Others
                # end in a segmentation fault. as_strided checks it.
                with pytest.raises(RuntimeError, match=FREED):
                    torch.as_strided(unsharded[0], (1,), (1,)) + 1
                again = model(x)
                assert torch.equal(again, own)
                again.sum().backward()


def test_other_parameters_are_refused_and_not_ignored_as_by_fsdp2() -> None:
    run_ranks(_parameters_as_arguments, 2)
