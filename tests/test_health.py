"""Checked steps name ranks whose memory differs, and `health` names where a NaN was born."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.models import Stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_ext
from fsdp_ext import (
    _C,
    FullyShardedDataParallel,
    Link,
    MixedPrecisionPolicy,
    Simulated,
    fully_shard,
)
from fsdp_ext.sharding.step_checks import Place, UnitLook, findings

TRANSPORTS = ("shared_memory", "process_group")


def sharded(system: Any = fully_shard, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        system(block, **settings)
    return system(model, **settings)


def step(model: Any, number: int = 0) -> Tensor:
    seed = 1 + number * dist.get_world_size() + dist.get_rank()
    (x,), _ = Stack().batch(torch.Generator().manual_seed(seed))
    loss = (model(x).float() - 1).square().mean()
    loss.backward()
    return loss.detach()


def flip_a_bit(values: Tensor) -> None:
    """Flip one bit as broken memory would: no version of a tensor tells."""
    values.data.view(-1).view(torch.int32)[3] ^= 1 << 20


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


# - What checked steps find


def _flip_in_the_gathered(model: Any, block: int, victims: tuple[int, ...]) -> None:
    def flip(module: Any, args: Any) -> None:
        if dist.get_rank() in victims:
            flip_a_bit(module.weight)

    model.blocks[block].up.register_forward_pre_hook(flip)


def _gathered(transport: str) -> str:
    model = sharded(transport=transport, check_every=2)
    _flip_in_the_gathered(model, 1, (1,))
    step(model)  # not checked
    return error_of(lambda: step(model))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_in_gathered_parameters_is_found(transport: str) -> None:
    for message in run_ranks(_gathered, 2, transport):
        assert message.startswith(
            "check_every=2 found memory that is wrong in step 2: ranks 0 and 1 differ in the "
            "gathered parameters of unit 'blocks.1' in forward, and no majority says which is "
            "wrong. Do not train on:"
        ), message


@pytest.mark.exhaustive
def test_the_rank_that_differs_from_most_is_named() -> None:
    for message in run_ranks(_gathered, 3, "shared_memory"):
        assert (
            "in step 2: rank 1 differs from the other 2 ranks in the gathered parameters of unit "
            "'blocks.1' in forward." in message
        ), message


def _kept_gathered() -> str:
    model = sharded(check_every=1, reshard_after_forward=False)
    _flip_in_the_gathered(model, 0, (0,))
    return error_of(lambda: step(model))


def test_a_unit_that_stays_unsharded_is_compared_at_the_end_of_backward() -> None:
    for message in run_ranks(_kept_gathered, 2):
        assert "differ in the gathered parameters of unit 'blocks.0' in backward" in message


def _shard(transport: str) -> tuple[str, str, str]:
    model = sharded(transport=transport, check_every=1)
    step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    loss = model(torch.ones(2, 10)).sum()
    if dist.get_rank() == 1:
        flip_a_bit(model.blocks[2].down.weight._local_tensor)
    found = error_of(loss.backward)
    again = error_of(lambda: step(model))  # every rank gathers the wrong bit
    with torch.no_grad():
        output = model(torch.ones(2, 10))
        model.blocks[2].down.weight.mul_(2)  # written, between steps or in one
    loss = model(torch.ones(2, 10)).sum()
    with torch.no_grad():
        model.blocks[2].down.weight.mul_(0.5)
    assert output.isfinite().all()
    return found, again, error_of(loss.backward)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_shard_that_changes_in_a_step_and_was_not_written_is_found(transport: str) -> None:
    for found, again, written in run_ranks(_shard, 2, transport):
        assert (
            "in step 2: the shard of unit 'blocks.2' on rank 1 changed between the step's "
            "beginning and its end, and nothing wrote it. Do not train on" in found
        ), found
        assert again == ""
        assert written == ""


def _replicas(sets: int) -> str:
    ranks = dist.get_world_size() // sets
    mesh = init_device_mesh("cpu", (sets, ranks), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh, check_every=1)
    step(model)
    if dist.get_rank() == 1:
        flip_a_bit(model.blocks[0].up.weight._local_tensor)
    return error_of(lambda: step(model))


def test_replicas_whose_shards_differ_are_found() -> None:
    for message in run_ranks(_replicas, 2, 2):
        assert "in step 2: ranks 0 and 1 differ in the shard of unit 'blocks.0'" in message, message


@pytest.mark.exhaustive
def test_replicas_of_a_shard_are_compared_with_each_other() -> None:
    for message in run_ranks(_replicas, 4, 2):
        assert "in step 2: ranks 1 and 3 differ in the shard of unit 'blocks.0'" in message, message


def test_what_is_most_specific_comes_first() -> None:
    def look(gathered: int, shard: int, changed: int = 0) -> list[UnitLook]:
        return [UnitLook(7, 0, 1, 0), UnitLook(gathered, 5, shard, changed)]

    place = Place([4, 5, 6, 7, 8, 9], in_set=2)
    looks = [look(3, 1), look(3, 2), look(9, 8, 1), look(9, 2), look(3, 1), look(0, 2)]
    assert findings(looks, ["the root", "up"], place) == [
        "the shard of unit 'up' on rank 6 changed between the step's beginning and its end, and "
        "nothing wrote it",
        "rank 6 differs from the other 2 ranks in the shard of unit 'up'",
        "ranks 6 and 7 differ from the other 3 ranks in the gathered parameters of unit 'up' in "
        "forward",
    ]
    assert findings([look(3, 1)] * 2, ["the root", "up"], Place([0, 1], in_set=2)) == []


# - What checks leave alone


def _train(model: Any, every: int | None, accumulates: bool) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(4):
        if accumulates:
            model.set_requires_gradient_sync(False)
            losses.append(step(model, 10 + number))
            model.set_requires_gradient_sync(True)
        losses.append(step(model, number))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.ones(2, 10)).sum())
    return losses


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "gloo": {"transport": "process_group"},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "pieces": {"bucket_bytes": 0, "max_message_bytes": 600},
    "no prefetch": {"prefetch": 0},
}


def _same_as_unchecked() -> None:
    for name, settings in CASES.items():
        for accumulates in (False, True):
            runs = {}
            for every in (None, 1, 3):
                model = sharded(**settings, check_every=every)
                runs[every] = [*_train(model, every, accumulates), *model.parameters()]
            for every in (1, 3):
                for have, want in zip(runs[every], runs[None], strict=True):
                    local = [getattr(each, "_local_tensor", each) for each in (have, want)]
                    assert torch.equal(*local), (name, accumulates, every)


def test_training_with_checks_equals_training_without() -> None:
    run_ranks(_same_as_unchecked, 2)


def _compared_steps() -> list[int]:
    model = sharded(check_every=3)
    step(model)
    root = model._fsdp_ext_unit.root
    seen: list[int] = []
    compare = root.checks.compare
    root.checks.compare = lambda number, *others: (seen.append(number), compare(number, *others))
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(2, 10))  # no step
        step(model)
    (model(torch.ones(2, 10)) + model(torch.ones(2, 10))).sum().backward()  # one step
    model.stem.weight.requires_grad_(False)  # the C++ side is made anew
    step(model)
    return seen


def test_steps_are_counted_by_their_backward() -> None:
    assert run_ranks(_compared_steps, 2) == [[3, 6]] * 2


def _goes_on() -> tuple[str, str]:
    model = sharded(check_every=1)

    def fail(module: Any, args: Any) -> None:
        raise ValueError("a user's error")

    handle = model.blocks[1].register_forward_hook(lambda *_: fail(*_[:2]))
    with pytest.raises(ValueError, match="a user's error"):
        step(model)
    handle.remove()
    after = error_of(lambda: step(model))
    _flip_in_the_gathered(model, 1, (1,))
    return after, error_of(lambda: step(model))


def test_a_step_that_failed_leaves_nothing_to_compare() -> None:
    for after, found in run_ranks(_goes_on, 2):
        assert after == ""
        assert "in step 3" in found


def _ends_before_it_compares() -> str:
    model = sharded(check_every=2)
    step(model)
    if dist.get_rank() == 1:
        model._fsdp_ext_unit.root.checks.compare = lambda *_: os._exit(3)
    return error_of(lambda: step(model))


def test_a_rank_that_ends_before_the_comparison_is_named() -> None:
    (message,) = run_ranks(_ends_before_it_compares, 2, timeout=60.0, lost=[1])
    assert message.startswith("rank 0: rank 1 (process ")
    what = "the comparison of all ranks at the end of a checked step"
    assert f"has ended before or during {what}." in message


def _simulated() -> str:
    dist.destroy_process_group()  # Simulated makes its own
    model = sharded(transport=Simulated(4, Link("test", 1e-6, 1e-9)), check_every=1)
    model(torch.ones(2, 10)).sum().backward()
    return str(fsdp_ext.health(model))


def test_simulated_ranks_are_not_compared() -> None:
    (shown,) = run_ranks(_simulated, 1)
    assert "All gradients are finite." in shown


# - Settings


def _disagree() -> str:
    every = 100 if dist.get_rank() == 0 else None
    model = sharded(check_every=every)
    with pytest.raises(ValueError, match="check_every is") as raised:
        step(model)
    return str(raised.value)


def test_ranks_that_disagree_name_both_values() -> None:
    message = (
        "check_every is 100 on rank 0 and None on rank 1. Pass the same value to fully_shard on "
        "all ranks."
    )
    assert run_ranks(_disagree, 2) == [message] * 2


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "auto"])
def test_check_every_is_a_number_of_steps(value: Any) -> None:
    with pytest.raises(RanksFailed, match=r"check_every is .*\. Pass a number of steps"):
        run_ranks(_shard_linear, 1, value)


def _shard_linear(value: Any) -> None:
    fully_shard(nn.Linear(2, 2), check_every=value)


def _wrapper() -> tuple[str, str]:
    torch.manual_seed(0)
    policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), auto_wrap_policy=policy, check_every=1
    )

    def spoil(module: Any, args: Any) -> None:
        if dist.get_rank() == 1:
            flip_a_bit(module.weight)

    fine = error_of(lambda: step(model))
    assert "All gradients are finite." in str(fsdp_ext.health(model))
    assert fsdp_ext.health(model).gradient_norm > 0
    model.module[1].module.register_forward_pre_hook(spoil)
    return fine, error_of(lambda: step(model))


def test_fsdp1s_wrapper_checks_too() -> None:
    for fine, found in run_ranks(_wrapper, 2):
        assert fine == ""
        assert "in step 2: ranks 0 and 1 differ in the gathered parameters of unit" in found


# - health


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


def _spoil(model: Any, block: int, value: float) -> None:
    """Let the gradient of a block's output have one element that is not finite, on rank 1."""

    def spoil(module: Any, args: Any, output: Tensor) -> None:
        if dist.get_rank() == 1:
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
@pytest.mark.parametrize("case", ["default", "bf16", "pieces"])
def test_the_unit_and_the_rank_of_a_nan_are_named(transport: str, value: float, case: str) -> None:
    settings = {name: one for name, one in CASES[case].items() if name != "transport"}
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
        for micro_batches in ([False], [True, False], [False], [False, True], [False]):
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
    added = [(), (-1,), (), (1,), ()]
    accumulated = [(), (1,), (), (1,), ()]
    assert run_ranks(_steps_around_a_nan, 2) == [[added, accumulated]] * 2


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
    with pytest.raises(TypeError, match="health got a Linear that fully_shard was not applied to"):
        fsdp_ext.health(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="health needs a model that has run forward"):
        fsdp_ext.health(model)
    step(model)
    model.set_is_last_backward(False)
    with pytest.raises(RuntimeError, match="health needs reduced gradients"):
        fsdp_ext.health(model)


def test_health_says_what_it_needs() -> None:
    run_ranks(_misuse, 1)


# - Hashes


@pytest.mark.parametrize("hash_of", [_C.hash_of, _C.hash_by_operators])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_a_hash_tells_every_flipped_bit(hash_of: Callable[[Tensor], Tensor], dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (9 * 37,), dtype=torch.uint8, generator=generator)
    size = dtype.itemsize
    values = data[: data.numel() // size * size]
    before = hash_of(values.view(dtype)).item()
    seen = {before}
    for place in range(values.numel()):
        for bit in range(8):
            values[place] ^= 1 << bit
            seen.add(hash_of(values.view(dtype)).item())
            values[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * values.numel()
    assert hash_of(values.view(dtype)).item() == before


def test_a_hash_by_operators_covers_all_words_of_large_tensors() -> None:
    values = torch.zeros((1 << 21) + 5, dtype=torch.int64)
    hashes = {_C.hash_by_operators(values).item()}
    for place in (0, (1 << 20) - 1, 1 << 20, (1 << 21) + 4):
        values[place] = 1
        hashes.add(_C.hash_by_operators(values).item())
        values[place] = 0
    assert len(hashes) == 5
