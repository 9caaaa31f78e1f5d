"""Gradients that a user keeps, and gradients that are converted, have the right numbers."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.launcher import run_ranks
from support.models import DeliberateFailure, TwoLayers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ext import fully_shard


def sharded(system: Any = fully_shard) -> Any:
    model = TwoLayers()
    for layer in model.layers:
        system(layer)
    return system(model)


def ones() -> Tensor:
    return torch.ones(2, 4)


WAYS = ("the gradient", "its local tensor", "to_local()", "a part of it", "an array", "detach()")


def _ways_to_keep(gradient: Any) -> dict[str, Any]:
    local = gradient.to_local()
    return {
        "the gradient": gradient,
        "its local tensor": gradient._local_tensor,
        "to_local()": local,
        "a part of it": local.view(-1)[1:3],
        "an array": local.numpy(),
        "detach()": gradient.detach(),
    }


def _numbers(kept: Any) -> Tensor:
    kept = kept.to_local() if isinstance(kept, DTensor) else kept
    return torch.as_tensor(kept).clone()


def _kept_gradients(system: Any) -> None:
    model = sharded(system)
    x = ones()
    for way in WAYS:
        model.zero_grad()
        model(x).square().sum().backward()
        kept = {name: _ways_to_keep(param.grad)[way] for name, param in model.named_parameters()}
        expected = {name: _numbers(gradient) for name, gradient in kept.items()}
        for scale in (2.0, 3.0):
            model.zero_grad()
            model(scale * x).square().sum().backward()
            for name, gradient in kept.items():
                assert torch.equal(_numbers(gradient), expected[name]), (way, name)
        # Each step has its own numbers.
        before = {name: param.grad.to_local().clone() for name, param in model.named_parameters()}
        del kept
        model.zero_grad()
        model(3.0 * x).square().sum().backward()
        for name, param in model.named_parameters():
            assert torch.equal(param.grad.to_local(), before[name]), (way, name)


def _gradients_kept_by_users() -> None:
    _kept_gradients(torch_fully_shard)
    _kept_gradients(fully_shard)
    _kept_gradients(partial(fully_shard, bucket_bytes=0, max_message_bytes=64))


def test_a_gradient_that_a_user_keeps_has_its_numbers_for_ever() -> None:
    run_ranks(_gradients_kept_by_users, 2)


def _some_gradients_kept() -> None:
    """Keep one gradient of a unit, whose other parameters accumulate or have other gradients."""
    for system in (torch_fully_shard, fully_shard):
        model = sharded(system)
        model(ones()).square().sum().backward()
        weight, bias = model.head.weight, model.head.bias
        kept = weight.grad
        first = kept.to_local().clone()
        weight.grad = weight.grad * 2  # somebody's own
        once = bias.grad.to_local().clone()
        model(ones()).square().sum().backward()
        assert torch.equal(kept.to_local(), first)
        assert torch.equal(weight.grad.to_local(), first * 3)
        assert torch.equal(bias.grad.to_local(), once * 2)
        # Accumulation changes the same gradient.
        accumulated = bias.grad
        model(ones()).square().sum().backward()
        assert accumulated is bias.grad
        assert torch.equal(accumulated.to_local(), once * 3)


def test_other_gradients_of_the_unit_accumulate_as_before() -> None:
    run_ranks(_some_gradients_kept, 2)


def _reused_gradients() -> None:
    model = sharded()
    model(ones()).sum().backward()
    gradients = [weakref.ref(param.grad) for param in model.parameters()]
    flat_shard, flat_gradient = model.flat_shard()
    part = flat_gradient[:4]
    for _ in range(2):
        model.zero_grad()
        model(ones()).sum().backward()
        # The memory is the same one while nobody keeps a gradient.
        assert [ref() for ref in gradients] == [param.grad for param in model.parameters()]
    assert flat_shard.numel() == flat_gradient.numel()
    # A user of the flat gradient follows it.
    part.zero_()
    model.zero_grad()
    model(ones()).sum().backward()
    assert part.abs().sum() > 0


def test_gradients_that_nobody_keeps_are_used_again() -> None:
    run_ranks(_reused_gradients, 2)


def _converted_with_gradients(convert: str) -> None:
    model = sharded()
    model(ones()).square().sum().backward()
    expected = [param.grad.full_tensor().double() for param in model.parameters()]
    if convert == "twice":
        model.float()  # changes nothing
    model.double()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert param.dtype == torch.float64
        assert torch.equal(param.grad.full_tensor(), gradient)
    model(ones().double()).square().sum().backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), 2 * gradient)
    model.double()
    model(ones().double()).square().sum().backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), 3 * gradient)


@pytest.mark.parametrize("convert", ["at once", "twice"])
def test_a_model_with_gradients_can_be_converted(convert: str) -> None:
    run_ranks(_converted_with_gradients, 2, convert)


def _seen(model: Any, params: dict[str, Any]) -> list[list[float] | None]:
    """Return the gradients of the parameters that the model has now, and of the sharded ones."""
    seen = []
    for param in [*model.parameters(), *params.values()]:
        gradient: Any = param.grad
        seen.append(None if gradient is None else _numbers(gradient).flatten().tolist())
    return seen


def _between_passes(system: Any, **options: Any) -> list[Any]:
    model = TwoLayers()
    for layer in model.layers:
        system(layer, **options)
    system(model, **options)
    params = dict(model.named_parameters())
    seen = []

    def look(*_: Any) -> None:
        seen.append(_seen(model, params))

    def clear_kept() -> None:
        for param in params.values():
            param.grad = None

    def set_module() -> None:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)

    model.layers[1].register_forward_hook(look)
    for between in (lambda: None, model.zero_grad, clear_kept, set_module):
        output = model(ones())
        look()
        between()
        look()
        output.sum().backward()
        look()
    return seen


def _are_seen_as_under_fsdp2() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
        ours = _between_passes(fully_shard, **options)
        assert ours == _between_passes(torch_fully_shard, **options)
        assert any(gradient for seen in ours for gradient in seen)


def test_gradients_between_forward_and_backward_are_those_of_fsdp2() -> None:
    run_ranks(_are_seen_as_under_fsdp2, 1)


def _graph() -> None:
    model = sharded()
    (model(ones()) - 1).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the cycle of a gradient and its graph
        (model(ones()) - 1).square().mean().backward(create_graph=True)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.grad.to_local(), gradient.to_local())


def test_a_backward_that_makes_a_graph_leaves_gradients_where_users_look() -> None:
    run_ranks(_graph, 2)


def _with_gradients_of_users(system: Any, is_last: bool) -> list[Any]:
    model = sharded(system)
    own = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    seen = []
    for number in range(5):
        for name, param in model.named_parameters():
            if number in (0, 3):  # between these, .grad keeps what it has
                param.grad = own[name]
        model.set_is_last_backward(is_last)
        model(ones()).sum().backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(number % 2 == 1)
        model(ones()).sum().backward()
        model.set_requires_gradient_sync(True)
        assert all(param.grad is own[name] for name, param in model.named_parameters())
        seen.append([one.to_local().clone() for one in own.values()])
        if number == 2:
            model.zero_grad()
            model(ones()).sum().backward()  # changes no tensor of the user's
            assert not any(param.grad is own[name] for name, param in model.named_parameters())
            model.zero_grad()
            seen.append([one.to_local().clone() for one in own.values()])
    return seen


def _gradients_set_by_users() -> None:
    for is_last in (True, False):
        ours = _with_gradients_of_users(fully_shard, is_last)
        theirs = _with_gradients_of_users(torch_fully_shard, is_last)
        for one, other in zip(ours, theirs, strict=True):
            parity.assert_same("FSDP2", one, other)


def test_backward_adds_in_place_to_a_gradient_that_users_have_set() -> None:
    run_ranks(_gradients_set_by_users, 2)


def _older_gradients(system: Any) -> list[Tensor]:
    """Return older gradients that a user goes on with, and whether backward has added to them."""
    model = sharded(system)
    params = list(model.parameters())
    model(ones()).sum().backward()
    first = [param.grad for param in params]
    params[-1].grad = None
    model(ones()).sum().backward()  # into memory that nobody holds
    model.zero_grad()
    (2 * model(ones())).sum().backward()
    for param, gradient in zip(params, first, strict=True):
        param.grad = gradient
    model(ones()).sum().backward()
    params[0].requires_grad_(False)
    model(ones()).sum().backward()  # into new units
    assert all(param.grad is one for param, one in zip(params, first, strict=True))
    return [gradient.to_local().clone() for gradient in first]


def _older_gradients_beside_fsdp2() -> None:
    ours, theirs = _older_gradients(fully_shard), _older_gradients(torch_fully_shard)
    parity.assert_same("FSDP2", ours, theirs)


def test_backward_adds_in_place_to_older_gradients_that_users_hold() -> None:
    run_ranks(_older_gradients_beside_fsdp2, 2)


def _read_and_set_before_the_last_backward(system: Any) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(partial(system, mesh=mesh))
    model(ones()).sum().backward()
    seen = []
    for _ in range(2):
        model.set_is_last_backward(False)
        output = model(ones())
        if system is fully_shard:
            model._fsdp_ext_unit.root.impl.delay_stream("all-reduce", 0.1)
        output.sum().backward()
        seen.append([param.grad.to_local().clone() for param in model.parameters()])
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        model.set_is_last_backward(True)
        model(ones()).sum().backward()
        seen.append([param.grad.to_local().clone() for param in model.parameters()])
    return seen


def _before_the_last_backward_beside_fsdp2() -> None:
    ours = _read_and_set_before_the_last_backward(fully_shard)
    theirs = _read_and_set_before_the_last_backward(torch_fully_shard)
    for one, other in zip(ours, theirs, strict=True):
        parity.assert_same("FSDP2", one, other)


def test_gradients_can_be_read_and_set_before_the_last_backward() -> None:
    run_ranks(_before_the_last_backward_beside_fsdp2, 2)


def _gradient_of_user_after_a_failure() -> None:
    model = sharded()
    own = [torch.ones_like(param) for param in model.parameters()]
    for param, gradient in zip(model.parameters(), own, strict=True):
        param.grad = gradient

    def fail(_gradient: Tensor) -> None:
        raise DeliberateFailure

    hook = model.layers[0].register_forward_hook(lambda _m, _x, y: y.register_hook(fail) and None)
    with pytest.raises(DeliberateFailure):
        model(ones()).sum().backward()
    hook.remove()
    for param, gradient in zip(model.parameters(), own, strict=True):
        assert param.grad is gradient
        gradient.zero_()
    model(ones()).sum().backward()
    expected = sharded()
    expected(ones()).sum().backward()
    for gradient, param in zip(own, expected.parameters(), strict=True):
        assert torch.equal(gradient.to_local(), param.grad.to_local())


def test_a_backward_that_fails_leaves_gradients_that_users_have_set() -> None:
    run_ranks(_gradient_of_user_after_a_failure, 2)


def _gradients_of_replaced_units() -> None:
    model = sharded()
    last: Any = model.layers[1]
    last.requires_grad_(False)
    model(ones()).sum().backward()
    model.zero_grad(set_to_none=False)
    last.requires_grad_(True)  # the next forward recreates the units
    model(ones()).sum().backward()
    flat = model._fsdp_ext_unit.root.units[1].impl.flat_gradient()
    gradient = model.layers[0].weight.grad.to_local()
    assert flat.data_ptr() <= gradient.data_ptr() < flat.data_ptr() + flat.nbytes


def test_gradients_of_replaced_units_move_to_the_new_units() -> None:
    run_ranks(_gradients_of_replaced_units, 2)
