"""Changes of parameters, gradients or modes within a step, with the unsharded model's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.parity import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_ext import fully_shard
from fsdp_ext.optim import SGD
from fsdp_ext.sharding.root import unit_tree

WIDTH = 32


class Blocks(nn.Module):
    """The root unit has the parameters of ``head``. ``forces`` runs a backward inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.forces = self.enables = False
        self.unfreezes = ""
        self.runs_twice = self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        if self.unfreezes:
            self.get_submodule(self.unfreezes).bias.requires_grad_(True)  # type: ignore[union-attr]
        if self.enables:
            with torch.enable_grad():
                return self.inner(x)
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.runs_twice:
            x = self.first(x)
        if not self.skips:
            x = torch.tanh(self.second(x))
        if self.forces:
            position = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.second(position).square().sum(), position)
            x = x + force
        result: Tensor = self.head(x)
        return result


def clamp_gradients(module: nn.Module, *_: object) -> None:
    for param in module.parameters():
        assert param.grad is not None
        param.grad.clamp_(-1e-3, 1e-3)


def steps(model: Any, count: int = 2) -> None:
    for step in range(count):
        loss(model, step).backward()


def loss(model: Any, step: int) -> Tensor:
    result: Tensor = model(batch(step)).square().mean()
    return result


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def full_backward_hooks(model: Any) -> None:
    for module in (model.first, model.second):
        module.register_full_backward_hook(clamp_gradients)
    # If no input of a module requires a gradient, PyTorch runs its hooks before its backward.
    model(batch(0).requires_grad_()).square().mean().backward()


def freezing_before_backward(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    found = loss(model, 1)
    for module in (model.first, model.head):
        module.requires_grad_(False)
    found.backward()
    for module in (model.first, model.head):
        assert all(param.grad is None for param in module.parameters())
    optimizer.step()


def gradients_enabled_by_forward(model: Any) -> None:
    model.enables = True
    with torch.no_grad():
        output = model(batch(0))
    output.square().mean().backward()


def backward_inside_forward(model: Any) -> None:
    model.forces = True
    steps(model)


def writes_after_create_graph(model: Any) -> None:
    params = list(model.parameters())
    for step in range(3):
        loss(model, step).backward(create_graph=True)
        grads = [param.grad.detach() for param in params]
        with torch.no_grad():
            if step % 2:
                torch._foreach_add_(params, grads, alpha=-1.0)
            else:
                for param, grad in zip(params, grads, strict=True):
                    param.data.add_(grad, alpha=-1.0)
        for param in params:
            param.grad = None
    loss(model, 3).backward()


def writes_between_two_uses(model: Any) -> None:
    model.runs_twice = True
    for step in range(6):
        model.skips = step >= 2
        found = loss(model, step)
        for param in model.first.parameters():
            param.data.mul_(1.5)
        if hasattr(model.first, "reshard"):
            model.first.reshard()
        found.backward()


PROGRAMS = [
    full_backward_hooks,
    freezing_before_backward,
    gradients_enabled_by_forward,
    backward_inside_forward,
    writes_after_create_graph,
    writes_between_two_uses,
]


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Blocks()
    if options.pop("sharded", True):
        for module in (model.first, model.second, model):
            fully_shard(module, **options)
    return model


def _as_unsharded(program: Callable[[Any], None]) -> None:
    expected = made(sharded=False)
    program(expected)
    for bucket_bytes in (0, None):
        model = made() if bucket_bytes is None else made(bucket_bytes=bucket_bytes)
        program(model)
        for mine, want in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), want)
            assert (mine.grad is None) == (want.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(whole(mine.grad), want.grad)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_is_as_without_sharding(program: Callable[[Any], None]) -> None:
    run_ranks(_as_unsharded, 2, program)


def _freezes_a_parallel_parameter() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model[0], mesh["tensor"], ColwiseParallel(output_layouts=Shard(-1)))
    model[1].weight = nn.Parameter(
        distribute_tensor(model[1].weight.detach(), mesh["tensor"], [Shard(1)])
    )
    del model[1]
    fully_shard(model, mesh=mesh["data"])
    found = model(batch(0)).square().sum()
    model.requires_grad_(False)
    found.backward()
    assert all(param.grad is None for param in model.parameters())


def test_a_parallel_parameter_may_be_frozen_before_backward() -> None:
    run_ranks(_freezes_a_parallel_parameter, 2)


def _unfreezes() -> None:
    for name in ("head", "first"):
        model = made(sharded=False)
        getattr(model, name).bias.requires_grad_(False)
        for module in (model.first, model.second, model):
            fully_shard(module)
        loss(model, 0).backward()
        model.unfreezes = name
        with pytest.raises(RuntimeError, match=r"bias' of unit .* was unfrozen while forward ran"):
            loss(model, 1)
        model.unfreezes = ""
        loss(model, 2).backward()  # the next one knows it
        assert getattr(model, name).bias.grad is not None


def test_a_parameter_that_forward_unfreezes_is_an_error() -> None:
    run_ranks(_unfreezes, 2)


class UnfreezesLast(Blocks):
    """Unfreezes a parameter when forward has used it, for the next step."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        self.head.bias.requires_grad_(True)
        return result


def _unfreezes_for_the_next_step() -> None:
    model: Any = UnfreezesLast()
    model.head.bias.requires_grad_(False)
    for module in (model.first, model.second, model):
        fully_shard(module)
    for expected in (False, True):
        loss(model, 0).backward()
        assert (model.head.bias.grad is not None) == expected


def test_a_parameter_may_be_unfrozen_for_the_next_step() -> None:
    run_ranks(_unfreezes_for_the_next_step, 2)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor, routes_here: bool) -> Tensor:
        return x @ self.weight if routes_here else x


class UsesAParameterEarly(nn.Module):
    """Reads a parameter of the expert before the expert runs, so its gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), Expert()

    def forward(self, x: Tensor, routes_here: bool) -> Tensor:
        x = self.first(x)
        expert: Any = self.expert
        if hasattr(expert, "unshard"):
            expert.unshard()
        result: Tensor = expert(x + expert.scale, routes_here)
        return result


def _late_gradients() -> None:
    torch.manual_seed(0)
    expected: Any = UsesAParameterEarly()
    torch.manual_seed(0)
    model: Any = UsesAParameterEarly()
    for module in (model.first, model.expert, model):
        fully_shard(module, bucket_bytes=0)
    for step in range(2):
        for each in (expected, model):
            each(batch(step), dist.get_rank() == 1).square().sum().backward()
    for mine, want in zip(model.parameters(), expected.parameters(), strict=True):
        grad = torch.zeros_like(want) if want.grad is None else want.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(whole(mine.grad), grad / 2)


def test_a_late_gradient_keeps_that_of_another_ranks_parameter() -> None:
    run_ranks(_late_gradients, 2)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def _two_backwards_with_an_attached_optimizer() -> None:
    for options in ({}, {"bucket_bytes": 0}):
        model: Any = TwoHeads()
        for module in (model.a, model.b, model):
            fully_shard(module, **options)
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.attach(model)
        before = [whole(param).clone() for param in model.parameters()]
        for result in model(batch(0)):
            result.square().sum().backward()
        after = [whole(param) for param in model.parameters()]
        assert not any(map(torch.equal, before, after))


def test_units_of_one_bucket_may_have_backwards_of_their_own() -> None:
    run_ranks(_two_backwards_with_an_attached_optimizer, 2)


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


def _a_large_parameter_of_columns() -> None:
    expected, model = made(sharded=False), made(shard_placement_fn=columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_tree, "default_reduction_bytes", lambda *_: 64)
        for each in (expected, model):
            steps(each)
    for mine, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), want.grad)


def test_a_parameter_of_columns_may_be_larger_than_a_message() -> None:
    run_ranks(_a_large_parameter_of_columns, 2)


def fail_in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
    output.register_hook(lambda _: 1 / 0)


def _a_divide_factor_after_a_failed_backward() -> None:
    model = made()
    model.set_requires_gradient_sync(False)
    loss(model, 0).backward()
    failing = model.first.register_forward_hook(fail_in_backward)
    found = loss(model, 1)
    failing.remove()
    with pytest.raises(ZeroDivisionError):
        found.backward()
    model.set_gradient_divide_factor(3.0)
    model.set_requires_gradient_sync(True)
    with pytest.warns(UserWarning, match="were dropped"):
        found = loss(model, 2)
    found.backward()
    expected = made(sharded=False)
    loss(expected, 2).backward()
    torch.testing.assert_close(
        whole(model.head.weight.grad), expected.head.weight.grad * dist.get_world_size() / 3
    )


def test_a_divide_factor_may_change_after_a_failed_backward() -> None:
    run_ranks(_a_divide_factor_after_a_failed_backward, 2)
