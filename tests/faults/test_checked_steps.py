"""Checked steps name ranks whose memory differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.stacks import SETTINGS, TRANSPORTS, error_of, sharded, step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext import _C, FullyShardedDataParallel, Link, Simulated, fully_shard
from fsdp_ext.optim import SGD
from fsdp_ext.sharding.root import root
from fsdp_ext.sharding.root.step_checks import MeshRanks, StepChecksum, findings, outdated


def flip_a_bit(values: Tensor) -> None:
    """Flip one bit as broken memory would: no version of a tensor tells."""
    values.data.view(-1).view(torch.int32)[3] ^= 1 << 20


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
    def look(gathered: int, shard: int, changed: int = 0) -> list[StepChecksum]:
        return [StepChecksum(7, 0, 1, 0), StepChecksum(gathered, 5, shard, changed)]

    ranks = MeshRanks([4, 5, 6, 7, 8, 9], group_size=2)
    looks = [look(3, 1), look(3, 2), look(9, 8, 1), look(9, 2), look(3, 1), look(0, 2)]
    assert findings(looks, ["the root", "up"], ranks) == [
        "the shard of unit 'up' on rank 6 changed between the step's beginning and its end, and "
        "nothing wrote it",
        "rank 6 differs from the other 2 ranks in the shard of unit 'up'",
        "ranks 6 and 7 differ from the other 3 ranks in the gathered parameters of unit 'up' in "
        "forward",
    ]
    assert findings([look(3, 1)] * 2, ["the root", "up"], MeshRanks([0, 1], group_size=2)) == []


def test_a_difference_of_what_was_gathered_ahead_is_no_fault_of_memory_yet() -> None:
    def look(gathered: int, ahead: int, other: int = 5) -> list[StepChecksum]:
        return [StepChecksum(gathered, 0, 1, 0, ahead), StepChecksum(other, 5, 1, 0)]

    names, ranks = ["the root", "up"], MeshRanks([0, 1], group_size=2)
    assert outdated([look(3, 1), look(4, 1, other=6)], names, ranks) == [
        "ranks 0 and 1 differ in the gathered parameters of unit 'the root' in forward, and no "
        "majority says which is wrong"
    ]
    assert outdated([look(3, 1), look(3, 1, other=6)], names, ranks) == []


CASES_OF_WRITES = [*((settings, False) for settings in SETTINGS.values()), ({}, True)]


def _written_after_its_gather(victims: tuple[int, ...]) -> list[str]:
    found = []
    for settings, attaches in CASES_OF_WRITES:
        model = sharded(**settings, check_every=1)
        optimizer = SGD(model.parameters(), lr=0.1)
        if attaches:
            optimizer.attach(model)  # it writes the shards within the step
        for change in (lambda _: None, lambda weight: weight.mul_(0.5), _halve_unseen):
            error = error_of(lambda model=model: step(model))
            optimizer.step()
            model.prefetch_next_forward()
            model.blocks[0].unshard()  # ends after the root's gather, which stays in flight
            dist.barrier()  # the peers' gathers have ended, too
            if dist.get_rank() in victims or change is not _halve_unseen:
                with torch.no_grad():
                    change(model.stem.weight)
            found.append(error or error_of(lambda model=model: step(model)))
    return found


def _halve_unseen(weight: Tensor) -> None:
    weight.data.mul_(0.5)


@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_a_write_after_prefetch_next_forward_that_no_version_tells_of(
    victims: tuple[int, ...],
) -> None:
    who = "ranks 0 and 1" if len(victims) == 2 else "rank 1"
    for messages in run_ranks(_written_after_its_gather, 2, victims):
        assert messages[::3] == messages[1::3] == [""] * len(CASES_OF_WRITES)
        for message in messages[2::3]:
            assert (
                "found parameters that may have been written after their gather began, in step 6: "
                f"the gathered parameters of unit 'the root' are not those of the shard on {who}. "
                "Writes through .data, " in message
            ), messages


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
        if number % 2 == 1:
            model.prefetch_next_forward()
        with torch.no_grad():
            losses.append(model(torch.ones(2, 10)).sum())
    return losses


def _same_as_unchecked() -> None:
    for name, settings in SETTINGS.items():
        for accumulates in (False, True):
            runs = {}
            for every in (None, 1, 3):
                model = sharded(**settings, check_every=every)
                runs[every] = [*_train(model, every, accumulates), *model.parameters()]
            for every in (1, 3):
                for have, want in zip(runs[every], runs[None], strict=True):
                    local = [getattr(each, "_local_tensor", each) for each in (have, want)]
                    assert torch.equal(*local), (name, accumulates, every)


@pytest.mark.exhaustive
def test_training_with_checks_equals_training_without() -> None:
    run_ranks(_same_as_unchecked, 2)


def _compared_steps() -> list[int]:
    model = sharded(check_every=3)
    step(model)
    with mock.patch.object(root, "compare_step", wraps=root.compare_step) as compare:
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, 10))  # no step
            step(model)
        (model(torch.ones(2, 10)) + model(torch.ones(2, 10))).sum().backward()  # one step
        model.stem.weight.requires_grad_(False)  # the C++ side is made anew
        step(model)
    return [call.args[0] for call in compare.call_args_list]


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
    ends = mock.Mock(side_effect=lambda *_: os._exit(3))
    with mock.patch.object(root, "compare_step", ends if dist.get_rank() else root.compare_step):
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
    with pytest.raises(ValueError, match="check_every=") as at_first:
        model.unshard()
    with pytest.raises(ValueError, match="check_every=") as raised:
        step(model)
    assert str(at_first.value) == str(raised.value)
    return str(raised.value)


def test_ranks_that_disagree_name_both_values() -> None:
    here, there = (f"the root (transport=shared_memory, check_every={n})" for n in (100, None))
    for message in run_ranks(_disagree, 2):
        assert f"rank 0 has {here} where rank 1 has {there}. Make the model" in message


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
