"""`health` tells norms of gradients, and names where a NaN was born."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import Stack
from support.stacks import SETTINGS, TRANSPORTS, sharded, step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy


def _norms(transport: str) -> None:
    torch.manual_seed(0)
    ours, theirs = sharded(transport=transport), sharded(torch_fully_shard)
    for model in (ours, theirs):
        for _ in range(2):
            model.zero_grad()
            step(model)
    torch.manual_seed(0)
    reference = Stack()
    step(reference)
    for param in reference.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= dist.get_world_size()
    health = fsdp_ext.health(ours)
    assert [unit.name for unit in health.units] == ["blocks.2", "blocks.1", "blocks.0", "the root"]
    for unit in health.units[:-1]:
        module = reference.get_submodule(unit.name)
        want = nn.utils.get_total_norm([param.grad for param in module.parameters()])
        assert unit.gradient_norm == pytest.approx(want.item(), rel=1e-5)
        assert (unit.nonfinite, unit.born_on) == (0, ())
    total = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).full_tensor()
    assert health.gradient_norm == pytest.approx(total.item(), rel=1e-5)
    assert health.first_nonfinite is None
    assert str(health).endswith(f"All gradients are finite. Their norm is {total.item():.6g}.")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_norms_are_those_of_fsdp2_and_of_the_unsharded_model(transport: str) -> None:
    run_ranks(_norms, 2, transport)


def _norm_of_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ours, theirs = sharded(mesh=mesh), sharded(torch_fully_shard, mesh=mesh)
    step(ours)
    step(theirs)
    total = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).full_tensor()
    assert fsdp_ext.health(ours).gradient_norm == pytest.approx(total.item(), rel=1e-5)


def test_the_norm_counts_each_shard_once() -> None:
    run_ranks(_norm_of_replicas, 2)


def _spoil(model: Any, block: int, value: float) -> None:
    """Let the gradient of a block's output have one element that is not finite, on rank 1."""

    def spoil(module: Any, args: Any, output: Tensor) -> None:
        if dist.get_rank() == 1 and output.requires_grad:
            output.register_hook(lambda gradient: gradient.clone().fill_(value))

    model.blocks[block].up.register_forward_hook(spoil)


def _born(transport: str, settings: dict[str, Any], value: float) -> fsdp_ext.Health:
    model = sharded(transport=transport, **settings)
    step(model)
    _spoil(model, 1, value)
    step(model)
    return fsdp_ext.health(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("case", ["default", "bf16", "pieces", "bucket in pieces"])
def test_the_unit_and_the_rank_of_a_nan_are_named(transport: str, value: float, case: str) -> None:
    settings = {name: one for name, one in SETTINGS[case].items() if name != "transport"}
    for health in run_ranks(_born, 2, transport, settings, value):
        assert health.first_nonfinite is not None
        assert health.first_nonfinite.name == "blocks.1"
        assert health.first_nonfinite.born_on == (1,)
        by_name = {unit.name: unit for unit in health.units}
        assert (by_name["blocks.2"].nonfinite, by_name["blocks.2"].born_on) == (0, ())
        assert by_name["blocks.0"].born_on == (1,)
        # up.weight and up.bias, and norm.weight and norm.bias, which lie before it
        assert by_name["blocks.1"].nonfinite == 14 * 10 + 14 + 10 + 10
        assert str(health).endswith(
            "The first unit in backward with NaN or Inf is 'blocks.1', on rank 1."
        )


def _steps_around_a_nan() -> list[list[tuple[int, ...]]]:
    """Return where gradients of a unit were not finite, with NaN in some of the backwards."""
    model = sharded()
    spoils = [False]

    def spoil(module: Any, args: Any, output: Tensor) -> None:
        if spoils[0] and dist.get_rank() == 1:
            output.register_hook(lambda gradient: gradient * float("nan"))

    model.blocks[1].up.register_forward_hook(spoil)

    def born() -> tuple[int, ...]:
        found = fsdp_ext.health(model).first_nonfinite
        return () if found is None else found.born_on or (-1,)

    seen = []
    for accumulates in (False, True):  # without gradient sync, or in the sharded gradients
        of_case = []
        for micro_batches in (
            [False],
            [True, False],
            [False],
            [False, True],
            [True, False, False],
            [False],
        ):
            model.zero_grad()
            for number, spoils[0] in enumerate(micro_batches, 1):
                if accumulates:
                    model.set_requires_gradient_sync(number == len(micro_batches))
                step(model)
            of_case.append(born())
        seen.append(of_case)
    return seen


def test_a_nan_counts_from_the_first_backward_that_is_reduced_to_the_last() -> None:
    # -1: an earlier backward has reduced it, so that the last one does not know its rank
    added = [(), (-1,), (), (1,), (-1,), ()]
    accumulated = [(), (1,), (), (1,), (1,), ()]
    assert run_ranks(_steps_around_a_nan, 2) == [[added, accumulated]] * 2


def _evaluated_afterwards() -> list[tuple[int, ...]]:
    model = sharded()
    _spoil(model, 1, float("nan"))
    seen = []
    for _ in range(2):
        step(model)
        model.blocks[2].set_reshard_after_forward(False)  # memory is planned again
        with torch.no_grad():
            model(torch.ones(2, 10))
        found = fsdp_ext.health(model).first_nonfinite
        assert found is not None
        seen.append(found.born_on)
        model.zero_grad()
    return seen


def test_ranks_are_known_after_memory_was_planned_again() -> None:
    assert run_ranks(_evaluated_afterwards, 2) == [[(1,)] * 2] * 2


def _unreduced() -> None:
    model = sharded()
    step(model)
    model.set_requires_gradient_sync(False)
    step(model)
    with pytest.raises(RuntimeError, match="a backward without gradient sync has left some"):
        fsdp_ext.health(model)
    model.set_requires_gradient_sync(True)
    step(model)
    assert fsdp_ext.health(model).first_nonfinite is None


def test_unreduced_gradients_are_refused() -> None:
    run_ranks(_unreduced, 2)


def _born_in_a_replica() -> fsdp_ext.Health:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    if dist.get_rank() == 3:
        model.blocks[1].up.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda g: g * float("nan")) and None
        )
    step(model)
    return fsdp_ext.health(model)


@pytest.mark.exhaustive
def test_a_nan_is_named_in_any_set_of_replicas() -> None:
    for health in run_ranks(_born_in_a_replica, 4):
        assert health.first_nonfinite is not None
        assert (health.first_nonfinite.name, health.first_nonfinite.born_on) == ("blocks.1", (3,))


def _overflow() -> str:
    model = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model.set_gradient_divide_factor(1.0)
    (40_000.0 * model(torch.ones(1, 10))).sum().backward()
    return str(fsdp_ext.health(model))


def test_an_overflow_in_the_reduction_is_told_from_one_of_a_rank() -> None:
    for shown in run_ranks(_overflow, 2):
        assert "no rank's own gradients had one in the last backward. The sum" in shown, shown


def _misuse() -> None:
    model = sharded()
    with pytest.raises(RuntimeError, match="health needs a model that has run forward"):
        fsdp_ext.health(model)
    step(model)
    model.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="health needs reduced gradients"):
        fsdp_ext.health(model)


def test_health_says_what_it_needs() -> None:
    run_ranks(_misuse, 1)
