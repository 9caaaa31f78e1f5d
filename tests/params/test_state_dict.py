"""State dicts have the unsharded model's names and sharded DTensors, and can be loaded again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import models
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack, Transformer
from support.parity import (
    SYSTEM,
    Case,
    Record,
    Run,
    Sharded,
    adamw,
    assert_same,
    check,
    each,
    load_system,
    train_step,
    trained,
    whole,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext.sharding.root import unit


class WithBuffers(Stack):
    """A stack with a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(models.DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x * self.scratch)


SUBJECTS = {
    "several units": WithBuffers,
    "a tied head": Transformer,
    "nested units": models.NestedUnits,
    "few rows": models.FewRows,
}


def run_of(case: Case) -> Sharded:
    return Sharded(load_system(SYSTEM), case)


def gathered(state: dict[str, Tensor]) -> Record:
    return {name: whole(tensor) for name, tensor in state.items()}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _state_is_that_of_the_unsharded_model(subject: str) -> None:
    case = Case("", SUBJECTS[subject])
    torch.manual_seed(0)
    unsharded = case.subject().state_dict()
    state = run_of(case).model.state_dict()
    assert list(state) == list(unsharded)
    assert_same("state dict", dict(unsharded), gathered(state))
    buffers = {"steps"}
    for name, tensor in state.items():
        if name not in buffers:
            assert isinstance(tensor, DTensor)
            assert tensor.placements == (Shard(0),)
            assert not tensor.requires_grad


@pytest.mark.parametrize("subject", list(SUBJECTS))
@pytest.mark.parametrize("world_size", [1, 2, *exhaustive(3)])
def test_names_and_values_are_those_of_the_unsharded_model(world_size: int, subject: str) -> None:
    run_ranks(_state_is_that_of_the_unsharded_model, world_size, subject)


def _state_while_unsharded() -> None:
    run = run_of(Case("", Stack))
    expected = gathered(run.model.state_dict())
    with torch.no_grad():
        run.loss(0)
    run.model.blocks[0].unshard()
    state = run.model.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    assert_same("state dict of an unsharded model", expected, gathered(state))
    run.backward(run.loss(0))  # the model still runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_of_unsharded_units_is_sharded(world_size: int) -> None:
    run_ranks(_state_while_unsharded, world_size)


def _state_follows_training() -> None:
    run = run_of(Case("", Stack))
    before = gathered(run.model.state_dict())
    train_step(run, 0)
    after = gathered(run.model.state_dict())
    assert after.keys() == before.keys()
    assert_same("state dict", run.recorded(copy=whole), {**run.recorded(copy=whole), **after})
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_a_state_dict_has_what_the_optimizer_made_of_the_parameters() -> None:
    run_ranks(_state_follows_training, 2)


def go_back(assign: bool, run: Run, step: int) -> tuple[Tensor, ...]:
    """Take every fourth step twice: save a state before it, load it afterwards."""
    if step % 4 == 1:
        state = copied(run.model.state_dict())
        optimizer = torch.optim.SGD(run.parameters.values(), lr=0.1)
        run.optimizer.zero_grad()
        run.backward(run.loss(step, micro_batch=3))
        optimizer.step()
        keys = run.model.load_state_dict(state, assign=assign)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        if assign:
            run.renew_optimizer()
    return train_step(run, step)


CASES = [
    Case("loaded", Stack, step=partial(go_back, False)),
    Case("loaded with buffers", WithBuffers, step=partial(go_back, False)),
    Case("loaded with a tied head", Transformer, step=partial(go_back, False)),
    Case("loaded in mixed precision", Stack, step=partial(go_back, False), unsharded=None,
         precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    Case("assigned", Stack, step=partial(go_back, True)),
    Case("assigned with rows that do not divide", models.FewRows, (3,),
         step=partial(go_back, True)),
]  # fmt: skip


@each(CASES)
def test_a_state_goes_back_where_it_came_from(case: Case, world_size: int) -> None:
    check(case, world_size)


def _assigned_tensors_are_the_parameters() -> None:
    run = run_of(Case("", Stack))
    train_step(run, 0)
    state = copied(run.model.state_dict())
    run.model.load_state_dict(state, assign=True)
    loss = run.loss(1)
    run.backward(loss)
    after = run.model.state_dict()
    assert_same("assigned state", gathered(state), gathered(after))
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.placements == parameter.placements


def test_assigned_parameters_get_gradients() -> None:
    run_ranks(_assigned_tensors_are_the_parameters, 2)


def _assigned_rows_move_once() -> None:
    run = run_of(Case("", Stack))
    train_step(run, 0)
    state = {name: value * 2 for name, value in run.model.state_dict().items()}
    with mock.patch.object(unit, "zeros_for_shard", wraps=unit.zeros_for_shard) as flat_shards:
        run.model.load_state_dict(state, assign=True)
        assert flat_shards.call_count == 0
        assert_same("assigned state", gathered(state), gathered(run.model.state_dict()))
        train_step(run, 1)
        assert flat_shards.call_count == 1 + len(run.units)


def test_assigned_parameters_move_into_flat_memory_once_a_unit() -> None:
    run_ranks(_assigned_rows_move_once, 2)


def _a_tied_head_is_assigned() -> None:
    records = []
    for assign in (False, True):
        run = run_of(Case("", Transformer))
        train_step(run, 0)
        run.model.load_state_dict(copied(run.model.state_dict()), assign=assign)
        run.renew_optimizer()
        train_step(run, 1)
        records.append(run.recorded())
    assert_same("assigned", *records)


def test_assigned_parameters_stay_tied() -> None:
    run_ranks(_a_tied_head_is_assigned, 2)


def _optimizer_goes_on() -> None:
    case = Case("", Stack, optimizer=adamw, steps=6)
    straight = run_of(case)
    history = trained(straight)

    first = run_of(case)
    for step in range(3):
        train_step(first, step)
    state = copied(first.model.state_dict()), first.optimizer.state_dict()
    second = run_of(case)
    second.model.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    for step in range(3, 6):
        losses = train_step(second, step)
        assert_same(f"step {step} after a restart", history[step], second.recorded(losses))


def test_training_goes_on_from_model_and_optimizer_state_as_if_it_had_not_stopped() -> None:
    run_ranks(_optimizer_goes_on, 2)


def _missing_and_unexpected_keys() -> None:
    run = run_of(Case("", Stack))
    state = run.model.state_dict()
    renamed = {name.replace("head", "tail"): tensor for name, tensor in state.items()}
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight(.|\n)*tail\.weight"):
        run.model.load_state_dict(renamed)
    run.backward(run.loss(0))


def test_keys_are_checked_as_usual() -> None:
    run_ranks(_missing_and_unexpected_keys, 1)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _full_state_dict() -> None:
    run = run_of(Case("", Stack))
    torch.manual_seed(0)
    unsharded = Stack().state_dict()
    state = get_model_state_dict(run.model, options=FULL)
    if torch.distributed.get_rank() == 0:
        assert_same("full state dict", dict(unsharded), dict(state))
    else:
        assert state == {}
    doubled = {name: tensor * 2 for name, tensor in unsharded.items()}
    set_model_state_dict(run.model, dict(doubled), options=StateDictOptions(full_state_dict=True))
    assert_same("loaded full state", dict(doubled), gathered(run.model.state_dict()))
    train_step(run, 0)


@pytest.mark.parametrize("world_size", [2, *exhaustive(3)])
def test_full_state_dicts_are_gathered_and_scattered_by_torch(world_size: int) -> None:
    run_ranks(_full_state_dict, world_size)


def _save(directory: Path) -> tuple[Record, list[Tensor]]:
    run = run_of(Case("", Transformer, optimizer=adamw))
    for step in range(3):
        train_step(run, step)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
    return gathered(run.model.state_dict()), _moments(run)


def _load(directory: Path) -> tuple[Record, list[Tensor]]:
    run = run_of(Case("", Transformer, optimizer=adamw))
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train_states = gathered(run.model.state_dict()), _moments(run)
    train_step(run, 3)
    return train_states


def _moments(run: Run) -> list[Tensor]:
    return [whole(run.optimizer.state[p]["exp_avg"]) for p in run.parameters.values()]


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), *exhaustive((2, 3), (3, 1))])
def test_a_distributed_checkpoint_is_loaded_on_as_many_ranks_or_others(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    saved, moments = run_ranks(_save, ranks[0], tmp_path)[0]
    for loaded, loaded_moments in run_ranks(_load, ranks[1], tmp_path):
        assert_same("loaded model", saved, loaded)
        assert all(map(torch.equal, moments, loaded_moments))
        assert any(bool(moment.any()) for moment in moments)
