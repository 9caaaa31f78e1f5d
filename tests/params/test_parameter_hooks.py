"""Hooks that users register on parameters, sharded and unsharded ones, run as with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.parity import SYSTEM, load_system, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class HookFailed(Exception):
    pass


def _calls(system: str) -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    load_system(system).fully_shard(model)
    calls = []

    def hook(name: str, result: Any) -> Any:
        def called(parameter: nn.Parameter) -> Any:
            assert parameter.grad is not None
            calls.append((name, parameter.grad.to_local().clone()))
            return result

        return called

    model.weight.register_post_accumulate_grad_hook(hook("a number", 3))
    removed = model.weight.register_post_accumulate_grad_hook(hook("removed", None))
    model.weight.register_post_accumulate_grad_hook(hook("a tensor", torch.ones(1)))
    removed.remove()
    for scale in (1.0, 2.0):
        model(torch.full((2, 4), scale)).sum().backward()
    return calls


def _hooks() -> None:
    for (theirs, expected), (ours, got) in zip(_calls("fsdp2"), _calls(SYSTEM), strict=True):
        assert ours == theirs
        assert torch.equal(got, expected)
    model = nn.Linear(4, 4)
    load_system(SYSTEM).fully_shard(model)

    def fail(_: Any) -> None:
        raise HookFailed("by the user")

    handle = model.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(HookFailed, match="by the user"):
        model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()


def test_values_that_post_accumulate_hooks_return_are_ignored() -> None:
    run_ranks(_hooks, 2)


def _hooks_after_conversions() -> None:
    for system in ("fsdp2", SYSTEM):
        model = nn.Linear(4, 4)
        load_system(system).fully_shard(model)
        called = []
        model.weight.register_post_accumulate_grad_hook(called.append)
        for step in range(4):
            model.to(torch.float32)
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            assert len(called) == step + 1, system


def test_post_accumulate_hooks_stay_after_conversions_of_the_module() -> None:
    run_ranks(_hooks_after_conversions, 2)


class OneOrTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, runs_both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if runs_both else x


def _hooks_after_a_hook_that_failed() -> None:
    model = OneOrTwo()
    for module in (model.first, model.second, model):
        load_system(SYSTEM).fully_shard(module)
    called = []

    def fail(_: Any) -> None:
        raise HookFailed("by the user")

    handle = model.first.weight.register_post_accumulate_grad_hook(fail)
    model.second.weight.register_post_accumulate_grad_hook(called.append)
    with pytest.raises(HookFailed):
        model(torch.ones(2, 4), runs_both=True).sum().backward()
    handle.remove()
    model(torch.ones(2, 4), runs_both=False).sum().backward()
    assert not called, "this backward has brought no gradient of it"
    model(torch.ones(2, 4), runs_both=True).sum().backward()
    assert len(called) == 1


def test_hooks_of_a_failed_backward_do_not_run_in_the_next_one() -> None:
    run_ranks(_hooks_after_a_hook_that_failed, 2)


def _order_of_hooks(system: str) -> list[str]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model):
        load_system(system).fully_shard(module)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model[0].register_full_backward_hook(lambda *_: order.append("backward of 0"))
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return order


def _hooks_in_order() -> None:
    first, second = ["0.weight", "0.bias"], ["1.weight", "1.bias"]
    assert sorted(_order_of_hooks("fsdp2")) == sorted(_order_of_hooks(SYSTEM))
    assert _order_of_hooks(SYSTEM) == ["backward of 0", *second, *first]


def test_post_accumulate_hooks_run_at_the_end_of_backward() -> None:
    run_ranks(_hooks_in_order, 2)


class Masked(nn.Module):
    """Puts hooks and an attribute on its unsharded weight, once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_watched = False
        self.called: list[str] = []

    def watch(self) -> None:
        self.is_watched = True
        weight: Any = self.linear.weight
        weight.mark = "mark"
        called = self.called  # a hook that refers to the module would keep the model
        weight.register_hook(lambda gradient: called.append("hook") or gradient * 0)
        weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_watched:
            self.watch()
        self.called.append(getattr(self.linear.weight, "mark", "no mark"))
        return self.linear(x)


def _freeze(model: nn.Sequential) -> None:
    model[1].requires_grad_(False)


def _freeze_and_unfreeze(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model(torch.ones(2, 4))
    model[0].called.pop()
    model.requires_grad_(True)


def _convert(model: nn.Sequential) -> None:
    model.to(torch.float32)


def _calls_after(system: str, change: Any, *, is_tensor_parallel: bool) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    if is_tensor_parallel:
        parallelize_module(model[0].linear, mesh["tp"], ColwiseParallel())
    for module in (model[0], model):
        load_system(system).fully_shard(module, mesh=mesh["dp"])
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if step == 0:
            model.zero_grad()
            change(model)
    gradient = model[0].linear.weight.grad.full_tensor()
    return model[0].called, float(gradient.abs().sum())


def _seen_before_the_last_backward(system: str) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    load_system(system).fully_shard(model)
    seen = []
    model.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(weight.grad.to_local().clone())
    )
    model.set_is_last_backward(False)
    for scale in (1.0, 2.0, 3.0):
        loss = model(torch.full((2, 4), scale)).sum()
        if system == SYSTEM and scale > 1.0:
            model._fsdp_ext_unit.root.impl.delay_stream("reduce", 0.05)
        loss.backward()
    return seen


def _hooks_before_the_last_backward() -> None:
    ours, theirs = map(_seen_before_the_last_backward, (SYSTEM, "fsdp2"))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_post_accumulate_hooks_see_reduced_gradients_before_the_last_backward() -> None:
    run_ranks(_hooks_before_the_last_backward, 2)


def _unsharded_hooks(changes: list[Any]) -> None:
    for change in changes:
        for is_tensor_parallel in (False, True):
            for system in ("fsdp2", SYSTEM):
                got = _calls_after(system, change, is_tensor_parallel=is_tensor_parallel)
                assert got == (["mark", "hook", "accumulated"] * 2, 0.0), (system, change.__name__)


def test_hooks_on_unsharded_parameters_stay_when_units_are_made_anew() -> None:
    run_ranks(_unsharded_hooks, 2, [_freeze, _freeze_and_unfreeze, _convert])


def _hooks_before_the_first_forward() -> None:
    for system in ("fsdp2", SYSTEM):
        model: Any = nn.Sequential(Masked(), nn.Linear(4, 4))
        for module in (model[0], model):
            load_system(system).fully_shard(module)
        model[0].unshard()
        model[0].watch()
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].called == ["mark", "hook", "accumulated"], system


def test_hooks_on_parameters_that_unshard_gives_stay_in_the_first_forward() -> None:
    run_ranks(_hooks_before_the_first_forward, 2)


class HookedNorm(nn.Module):
    """Tensor parallelism brings the gradient of the norm's weight as a partial sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.weight.register_post_accumulate_grad_hook(lambda _: None)
        result: Tensor = self.linear(self.norm(x))
        return result


def _hook_beside_partial_sums() -> None:
    gradients = []
    for system in ("fsdp2", SYSTEM):
        torch.manual_seed(0)
        model = HookedNorm()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        columns = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        plan = {"norm": SequenceParallel(), "linear": columns}
        parallelize_module(model, mesh["tensor"], plan)
        load_system(system).fully_shard(model, mesh=mesh["data"])
        model(torch.randn(2, 4, 8)).square().sum().backward()
        gradients.append(whole(model.norm.weight.grad))
    assert torch.equal(*gradients)


def test_a_hook_that_replaces_ours_leaves_partial_sums_to_the_reduction() -> None:
    run_ranks(_hook_beside_partial_sums, 2)
