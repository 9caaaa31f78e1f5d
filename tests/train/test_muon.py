"""fsdp_ext.optim.Muon over shards does what PyTorch's Muon does to whole matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import EmptyParameter, FewRows, Stack
from support.parity import Case, Run, check, device, each, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_ext import fully_shard
from fsdp_ext.optim import Muon, owned_matrices

# - Training as unsharded and under FSDP2


def matrices(parameters: Iterable[nn.Parameter], kind: Any = Muon, **options: Any) -> Any:
    """Return an optimizer of the matrices among ``parameters``."""
    return kind([each for each in parameters if each.ndim == 2], lr=0.05, **options)


def in_groups(parameters: Iterable[nn.Parameter]) -> Any:
    first, *rest = [each for each in parameters if each.ndim == 2]
    return Muon([{"params": rest, "momentum": 0.5}, {"params": [first], "ns_steps": 2}], lr=0.05)


def train_step(run: Run, step: int) -> tuple[Tensor, ...]:
    """Run a step. Vectors keep their values, and lose their gradients as matrices do."""
    run.model.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def drop_some_gradients(run: Run, step: int) -> tuple[Tensor, ...]:
    """Step other matrices in each step."""
    run.model.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    for index, parameter in enumerate(run.model.parameters()):
        if (index + step) % 3 == 0:
            parameter.grad = None
    run.optimizer.step()
    return (loss,)


def last_dimension(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


CASE = partial(Case, step=train_step, optimizer=matrices)
CASES = [
    CASE("Muon", Stack),
    CASE("momentum of Polyak", Stack, optimizer=partial(matrices, nesterov=False)),
    CASE("few rows", FewRows),
    CASE("a learning rate as for AdamW", Stack,
         optimizer=partial(matrices, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)),
    CASE("matrices sharded by columns", Stack, worlds=(2,),
         options={"shard_placement_fn": last_dimension}),
    CASE("parameter groups", Stack, optimizer=in_groups),
    CASE("empty matrices", EmptyParameter,
         fsdp2_fails="torch's pack expects non-empty tensors"),
    CASE("matrices without a gradient by turns", Stack, step=drop_some_gradients),
    CASE("matrices that are not sharded", Stack, ignored_params=("head.weight",)),
    CASE("replicas", Stack, worlds=(4,), mesh=(2, 2), unsharded=None),
    CASE("shards on the host", Stack, options={"offload_policy": CPUOffloadPolicy()},
         fsdp2_fails="torch pins memory, which needs a GPU"),
]  # fmt: skip


# On three ranks, FSDP2 rounds sums differently, and the cast to bfloat16 makes that larger.
@each(CASES, more=(1,), every=4)
def test_muon_steps_as_unsharded_and_as_under_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


# - Steps with given gradients

SHAPES = [(10, 14), (14, 10), (3, 40), (40, 3), (1, 5), (7, 7), (12, 12), (12, 12), (2, 64)]


def step_as_whole(
    mesh: DeviceMesh,
    placements: list[Placement],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Compare steps on matrices that lie on a mesh with PyTorch's on the same whole matrices."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return [value.to(device(), dtype) for value in values]

    def spread(value: Tensor) -> DTensor:
        return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)

    start = drawn()
    ours = [nn.Parameter(spread(value)) for value in start]
    torchs = [nn.Parameter(value) for value in start]
    optimizers: list[Any] = [Muon(ours, **options), torch.optim.Muon(torchs, **options)]
    for _ in range(3):
        for param, expected, grad in zip(ours, torchs, drawn(), strict=True):
            param.grad, expected.grad = spread(grad), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for param, expected in zip(ours, torchs, strict=True):
        states = [optimizers[0].state[param], optimizers[1].state[expected]]
        # On the host, the last elements of a tensor in bfloat16 are rounded differently.
        close = (
            {"rtol": 2**-7, "atol": 2**-10} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
        )
        torch.testing.assert_close(whole(param), expected.data, **close)
        assert torch.equal(whole(states[0]["momentum_buffer"]), states[1]["momentum_buffer"])


def _matrices_on_one_dimension() -> None:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        for least in (1, 200, owned_matrices._LEAST_OF_ROUND):  # several rounds, and one
            with mock.patch.object(owned_matrices, "_LEAST_OF_ROUND", least):
                step_as_whole(mesh, [placement])


def _matrices_in_bfloat16() -> None:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    step_as_whole(mesh, [Shard(0)], torch.bfloat16, lr=torch.tensor(0.02))


def _matrices_on_two_dimensions() -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    for placements in (
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
    ):
        step_as_whole(mesh, placements)


def _matrices_of_tensor_parallelism() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weights = [model[0].weight, model[2].weight]
    expected = [nn.Parameter(weight.full_tensor()) for weight in weights]
    optimizers: list[Any] = [Muon(weights, lr=0.1), torch.optim.Muon(expected, lr=0.1)]
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 6)).sin().sum().backward()
        for weight, parameter in zip(weights, expected, strict=True):
            parameter.grad = weight.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
        for weight, parameter in zip(weights, expected, strict=True):
            assert torch.equal(weight.full_tensor(), parameter)


@pytest.mark.parametrize(
    ("work", "ranks"),
    [
        (_matrices_on_one_dimension, 3),
        (_matrices_in_bfloat16, 2),
        (_matrices_on_two_dimensions, 4),
        (_matrices_of_tensor_parallelism, 4),
    ],
)
def test_results_are_those_of_whole_matrices(work: Callable[[], None], ranks: int) -> None:
    run_ranks(work, ranks)


# - In place of PyTorch's


def sharded() -> tuple[Any, list[Any]]:
    """Return a model and its matrices."""
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in model.units():
        fully_shard(unit)
    fully_shard(model)
    return model, [param for param in model.parameters() if param.ndim == 2]


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        model.zero_grad()
        args, kwargs = model.batch(torch.Generator().manual_seed(step))
        model.loss(model(*args, **kwargs)).backward()
        optimizer.step()


def same_weights(models: Iterable[Any]) -> bool:
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return all(torch.equal(first.to_local(), second.to_local()) for first, second in pairs)


def _states_are_those_of_torch() -> None:
    (first, firsts), (second, seconds) = sharded(), sharded()
    ours, torchs = Muon(firsts), torch.optim.Muon(seconds)
    train(first, ours)
    train(second, torchs)
    assert ours.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]
    for param, expected in zip(firsts, seconds, strict=True):
        (name,), (theirs,) = ours.state[param], torchs.state[expected]
        momentum, momentum_of_torch = ours.state[param][name], torchs.state[expected][theirs]
        assert name == theirs
        assert momentum.placements == momentum_of_torch.placements
        torch.testing.assert_close(
            momentum.to_local(), momentum_of_torch.to_local(), rtol=2e-2, atol=2e-3
        )
    # A state of PyTorch's goes on here, by both kinds of state dict, as ours does.
    weights, state = second.state_dict(), copy.deepcopy(torchs.state_dict())
    distributed = get_optimizer_state_dict(second, torchs)
    models = []
    for load in ("own", "distributed"):
        model, params = sharded()
        model.load_state_dict(copy.deepcopy(weights))
        optimizer = Muon(params)
        if load == "own":
            optimizer.load_state_dict(copy.deepcopy(state))
        else:
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(distributed))
        train(model, optimizer)
        models.append(model)
    assert same_weights(models)
    torchs.load_state_dict(ours.state_dict())
    train(second, torchs)


def _steps_have_hooks_closures_and_copies() -> None:
    (first, firsts), (second, seconds) = sharded(), sharded()
    optimizer, other = Muon(firsts), Muon(seconds)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    train(first, optimizer)
    assert calls == ["before", "after"] * 2
    train(second, other)
    other = copy.copy(other)

    def closure() -> Tensor:
        second.zero_grad()
        args, kwargs = second.batch(torch.Generator().manual_seed(0))
        loss: Tensor = second.loss(second(*args, **kwargs))
        loss.backward()
        return loss

    assert torch.is_grad_enabled()
    assert other.step(closure).requires_grad
    train(first, optimizer, 1)
    assert same_weights((first, second))


def _gradients_of_other_placements_are_redistributed() -> None:
    (first, firsts), (second, seconds) = sharded(), sharded()
    for params in (firsts, seconds):
        for number, param in enumerate(params):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            placements = [Replicate()] if params is firsts else param.placements
            param.grad = distribute_tensor(grad, param.device_mesh, placements)
        Muon(params).step()
    assert same_weights((first, second))


def _a_first_step_may_have_no_gradients() -> None:
    model, params = sharded()
    optimizer = Muon(params)
    optimizer.step()
    assert not optimizer.state
    train(model, optimizer)


def _other_parameters_are_refused() -> None:
    model, _ = sharded()
    with pytest.raises(ValueError, match="2D parameters"):
        Muon(model.parameters())
    model.stem.weight.grad = torch.ones(10, 10)
    with pytest.raises(TypeError, match="a plain tensor as gradient"):
        Muon([model.stem.weight]).step()


@pytest.mark.parametrize(
    "work",
    [
        _states_are_those_of_torch,
        _steps_have_hooks_closures_and_copies,
        _gradients_of_other_placements_are_redistributed,
        _a_first_step_may_have_no_gradients,
        _other_parameters_are_refused,
    ],
)
def test_muon_passes_for_torchs(work: Callable[[], None]) -> None:
    run_ranks(work, 2)


def _a_rank_steps_alone() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    param.grad = torch.ones_like(param)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 could not exchange .* ranks \[0, 1\]"):
            Muon([param]).step()


@pytest.mark.exhaustive
def test_the_error_of_a_rank_that_steps_alone_names_the_others() -> None:
    run_ranks(_a_rank_steps_alone, 2, fresh=True)  # the group's connection is broken afterwards


# - Owners


def test_owners_share_the_work() -> None:
    shapes = [(64, 64)] * 6 + [(128, 64)] * 2 + [(8, 8)] * 5
    found = [owned_matrices.ShardedMatrix(torch.Size(shape), 0) for shape in shapes]
    rounds = owned_matrices._rounds_of(found, 4)
    owned = [[i for each in rounds for i in each[rank]] for rank in range(4)]
    assert sorted(i for each in owned for i in each) == list(range(len(shapes)))
    loads = [sum(found[i].cost for i in each) for each in owned]
    assert max(loads) - min(loads) <= found[0].cost
    with mock.patch.object(owned_matrices, "_LEAST_OF_ROUND", 1):
        assert all(
            len(of_rank) <= 1 for each in owned_matrices._rounds_of(found, 4) for of_rank in each
        )
