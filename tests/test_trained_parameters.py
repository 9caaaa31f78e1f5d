"""What users write into parameters and what optimizers hold is what trains, or an error says so.

A model has its sharded parameters whenever no training step is under way: also after evaluations
and after exceptions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ext import fully_shard, register_fsdp_forward_method


class Stop(Exception):
    """Raised by a model on purpose."""


class Model(nn.Module):
    """Two layers in units of their own, and one in the root unit. It can fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.failure: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        if self.failure is not None:
            raise self.failure
        return self.head(x)

    def fail(self, x: Tensor) -> Tensor:
        raise Stop


def sharded(**options: Any) -> Any:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())


def ones() -> Tensor:
    return torch.ones(2, 4)


def whole(model: nn.Module) -> list[Tensor]:
    assert all_sharded(model)
    return [param.detach().full_tensor().clone() for param in model.parameters()]


def output_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(ones()).clone()


def ways_to_lose_parameters(model: Any) -> Iterator[str]:
    """End forward or backward of `model` in ways that leave no step under way."""
    with torch.no_grad():
        model(ones())
    yield "an evaluation"
    with torch.inference_mode():
        model(ones())
    yield "inference"
    model.failure = Stop()
    with pytest.raises(Stop):
        model(ones())
    model.failure = None
    yield "an exception in forward"
    try:
        raise Stop
    except Stop:
        output_of(model)
    yield "an evaluation while an exception is handled"
    register_fsdp_forward_method(model, "fail")
    with pytest.raises(Stop):
        model.fail(ones())
    yield "an exception in another method"
    hidden: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda *args: hidden.append(args[-1]))
    output = model(ones())
    handle.remove()
    hidden[0].register_hook(_raise)
    with pytest.raises(Stop):
        output.sum().backward()
    yield "an exception in backward"


def _raise(_: Any) -> None:
    raise Stop


def _parameters_after_every_end() -> None:
    model = sharded()
    for way in ways_to_lose_parameters(model):
        assert all_sharded(model), way
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = whole(model)
        model(ones()).square().sum().backward()
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, whole(model), strict=True)]
        assert changed[-1], way


def test_an_optimizer_made_after_an_evaluation_or_an_exception_trains() -> None:
    run_ranks(_parameters_after_every_end, 2)


def _write(model: nn.Module, write: str) -> None:
    for param in model.parameters():
        with torch.no_grad():
            if write == "in place":
                param.zero_()
            elif write == "through .data":
                param.data.zero_()
            else:
                torch._foreach_mul_([param], 0.0)


def _writes_after_evaluations() -> None:
    for write in ("in place", "through .data", "foreach"):
        model = sharded()
        assert output_of(model).abs().sum() > 0
        _write(model, write)
        assert torch.equal(output_of(model), torch.zeros(2, 4)), write
    model = sharded()
    output_of(model)
    for param in model.head.parameters():
        param.requires_grad_(False)
    model(ones()).sum().backward()
    assert model.head.weight.grad is None
    assert model.layers[0].weight.grad is not None


def test_what_is_written_into_parameters_after_an_evaluation_counts() -> None:
    run_ranks(_writes_after_evaluations, 2)


def _optimizer_of_unsharded_parameters() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(list(model.layers.parameters()), lr=0.1)
    loss = model(ones()).sum()
    optimizer.step()  # it has nothing to complain about
    optimizer.add_param_group({"params": [model.head.weight]})  # backward needs it unsharded
    loss.backward()
    with pytest.raises(RuntimeError, match=r"the unsharded 'head\.weight'.*after reshard"):
        optimizer.step()
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"the unsharded 'head\.weight'"):
        optimizer.step()


def test_an_optimizer_of_unsharded_parameters_is_refused() -> None:
    run_ranks(_optimizer_of_unsharded_parameters, 2)


def _parameters_unsharded_by_hand() -> None:
    model = sharded()
    expected = output_of(model)
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    for _ in range(2):  # as in FSDP2, the root stays unsharded
        assert torch.equal(output_of(model), expected)
        assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert all_sharded(model)
    output_of(model)
    assert all_sharded(model)
    # After an exception, unshard() gathers anew.
    model.failure = Stop()
    with pytest.raises(Stop):
        model(ones())
    model.head.weight.data.zero_()
    model.unshard()
    assert torch.equal(model.head.weight, torch.zeros(4, 4))


def test_parameters_that_the_user_has_unsharded_stay_so() -> None:
    run_ranks(_parameters_unsharded_by_hand, 2)


def _kept_slots() -> None:
    model = sharded(reshard_after_forward=False)
    expected = output_of(model)
    core = model._unit.root.core
    core.reset_counters()
    for _ in range(3):
        assert all_sharded(model)
        assert torch.equal(output_of(model), expected)
    assert core.counters()["all_gathers"] == 0
    model.layers[0].unshard()  # gathers anew
    assert core.counters()["all_gathers"] == 1
    with torch.no_grad():
        model.reshard()
        model.head.weight.zero_()
    model(ones()).sum().backward()
    assert torch.equal(output_of(model), model.head.bias.full_tensor().expand(2, 4))


def test_evaluations_that_keep_parameters_gather_once() -> None:
    run_ranks(_kept_slots, 2)


class Evaluating(Model):
    """Runs parts of itself without gradients, and catches an exception of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.layers[0](x)
            assert not isinstance(self.head.weight, DTensor)
        try:
            self.layers[1](None)
        except TypeError:
            assert not isinstance(self.head.weight, DTensor)
        return super().forward(x)


def _nested() -> None:
    model = Evaluating()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(ones()).square().sum().backward()
        assert all_sharded(model)
        assert all(param.grad is not None for param in model.parameters())
        output_of(model)
        assert all_sharded(model)
        # A layer that runs by itself after an exception is the outermost one.
        model.failure = Stop()
        with pytest.raises(Stop):
            model(ones())
        model.failure = None
        with torch.no_grad():
            model.layers[0](ones())
        assert all_sharded(model)


def test_only_the_outermost_forward_decides() -> None:
    run_ranks(_nested, 2)


# - Gradients that somebody keeps


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
    model = Model()
    for layer in model.layers:
        system(layer)
    system(model)
    x = ones()
    for way in _ways_to_keep_names():
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


def _ways_to_keep_names() -> list[str]:
    return ["the gradient", "its local tensor", "to_local()", "a part of it", "an array",
            "detach()"]  # fmt: skip


def _gradients_kept_by_users() -> None:
    _kept_gradients(torch_fully_shard)
    _kept_gradients(fully_shard)
    _kept_gradients(partial(fully_shard, bucket_bytes=0, max_message_bytes=64))


def test_a_gradient_that_a_user_keeps_has_its_numbers_for_ever() -> None:
    run_ranks(_gradients_kept_by_users, 2)


def _some_gradients_kept() -> None:
    """Keep one gradient of a unit, whose other parameters accumulate or have other gradients."""
    for system in (torch_fully_shard, fully_shard):
        model = Model()
        for layer in model.layers:
            system(layer)
        system(model)
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
