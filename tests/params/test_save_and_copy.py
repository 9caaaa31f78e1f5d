"""State dicts can be saved, pickled and copied like FSDP2's, and share the parameters' memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.launcher import run_ranks
from support.models import FewRows, Stack, WithEmpty
from support.parity import SYSTEM, Case, Sharded, adamw, load_system, train_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_ext


def trained(system: str = SYSTEM, steps: int = 3) -> Sharded:
    """Return a run whose units have been merged into buckets, which moves their shards."""
    run = Sharded(load_system(system), Case("", FewRows, optimizer=adamw))
    for step in range(steps):
        train_step(run, step)
    return run


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states_of(run: Sharded) -> dict[str, Any]:
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict()["state"],
        "gradients": {name: parameter.grad for name, parameter in run.parameters.items()},
    }


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled_and_loaded(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved_and_loaded,
    "pickle": pickled_and_loaded,
    "deepcopy": copy.deepcopy,
}


def assert_equal_but_apart(copied: dict[Any, Any], original: dict[Any, Any]) -> None:
    assert list(copied) == list(original)
    for name, value in original.items():
        if isinstance(value, dict):
            assert_equal_but_apart(copied[name], value)
        else:
            assert type(copied[name]) is type(value), name
            assert torch.equal(local(copied[name]), local(value)), name
            if local(value).numel():
                assert local(copied[name]).data_ptr() != local(value).data_ptr(), name


def _copies(how: str) -> None:
    run = trained()
    copied = COPIES[how](states_of(run))
    assert_equal_but_apart(copied, states_of(run))
    train_step(run, 7)
    reference = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(copied["model"])
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": copied["optimizer"]})
    train_step(run, 7)
    assert_equal_but_apart(run.model.state_dict(), reference)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_state_can_be_loaded_and_trained_from(how: str) -> None:
    run_ranks(_copies, 2, how)


def _parameter_without_elements(how: str) -> None:
    model = fsdp_ext.fully_shard(nn.Sequential(WithEmpty().bfloat16(), nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for state in (model.state_dict(), gradients):
        assert_equal_but_apart(COPIES[how](state), state)


@pytest.mark.parametrize("how", COPIES)
def test_a_parameter_without_elements_can_be_saved(how: str) -> None:
    run_ranks(_parameter_without_elements, 2, how)


def _sizes() -> None:
    nbytes = {}
    for system in ("fsdp2", SYSTEM):
        run = Sharded(load_system(system), Case("", Stack))
        train_step(run, 0)
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        nbytes[system] = file.tell()
    assert nbytes[SYSTEM] < 1.02 * nbytes["fsdp2"]


def test_a_saved_state_is_as_large_as_that_of_fsdp2() -> None:
    run_ranks(_sizes, 2)


def _aliases() -> None:
    run = trained(steps=0)
    before_training = run.model.state_dict()
    for step in range(3):
        train_step(run, step)
    after = run.model.state_dict()
    for name, parameter in run.parameters.items():
        for state in (before_training, after):
            assert torch.equal(local(state[name]), local(parameter)), name
    batch = run.batch(9)
    before_training["head.weight"].zero_()
    after["head.bias"].fill_(3.0)
    assert torch.equal(run.model(*batch[0]), torch.full((6, 7), 3.0))


def test_changes_of_a_state_dict_change_the_parameters() -> None:
    run_ranks(_aliases, 2)


def _outlives() -> None:
    run = trained()
    state = run.model.state_dict()
    values = {name: local(tensor).clone() for name, tensor in state.items()}
    del run
    for name, tensor in state.items():
        assert torch.equal(local(tensor), values[name])


def test_a_state_dict_outlives_its_model() -> None:
    run_ranks(_outlives, 2)


def _shared() -> None:
    expected = trained(steps=5).model.state_dict()
    run = trained()
    for tensor in run.model.state_dict().values():
        local(tensor).share_memory_()  # as sending it to another process does
    for parameter in run.parameters.values():
        local(parameter.grad).share_memory_()
    for step in (3, 4):
        train_step(run, step)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(local(tensor), local(expected[name])), name


def test_training_goes_on_after_the_state_was_sent_to_another_process() -> None:
    run_ranks(_shared, 2)


def _saved_in_the_background(directory: str) -> None:
    run = trained()
    saving = dcp.async_save(states_of(run), checkpoint_id=directory)
    train_step(run, 3)  # the state was copied before
    saving.result()
    expected = trained()
    loaded = states_of(run)
    dcp.load(loaded, checkpoint_id=directory)  # in place
    assert_equal_but_apart(run.model.state_dict(), expected.model.state_dict())


def test_async_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    run_ranks(_saved_in_the_background, 2, str(tmp_path))
