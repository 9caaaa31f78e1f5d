"""State dicts of models with activation checkpointing have the names of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from fsdp_ext import FullyShardedDataParallel as FSDP

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def make(*, orig: bool, before: bool) -> Any:
    """Wrap a model and its first layer, which is recomputed, before or after FSDP."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first: nn.Module = checkpoint_wrapper(model[0]) if before else model[0]
    model[0] = FSDP(first, use_orig_params=orig)
    if before:
        model[1] = checkpoint_wrapper(model[1])
    wrapped = FSDP(model, use_orig_params=orig)
    if not before:
        apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, nn.Linear | FSDP))
    return wrapped


def names_are_plain(orig: bool, before: bool) -> None:
    torch.manual_seed(0)
    model = make(orig=orig, before=before)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    assert sorted(saved["state"]) == sorted(NAMES)
    # A wrapper of the other kind, recomputed in the other way, loads it.
    other = make(orig=not orig, before=not before)
    theirs = torch.optim.Adam(other.parameters())
    theirs.load_state_dict(FSDP.optim_state_dict_to_load(other, theirs, saved))
    got = FSDP.optim_state_dict(other, theirs)
    for name, values in saved["state"].items():
        torch.testing.assert_close(got["state"][name], values, rtol=0, atol=0)

    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        with FSDP.summon_full_params(model):
            sharded = model.state_dict()
            assert list(sharded) == NAMES
            assert all(isinstance(value, DTensor) for value in sharded.values())
            for param in model.parameters():
                nn.init.zeros_(param)
            model.load_state_dict(sharded)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), whole[name], rtol=0, atol=0)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("orig", [True, False])
def test_names_in_state_dicts_are_those_of_the_plain_model(orig: bool, before: bool) -> None:
    run_ranks(names_are_plain, 2, orig, before)


def local_state_is_loaded(before: bool) -> None:
    model = make(orig=False, before=before)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = copy.deepcopy(model.state_dict())
        whole = [param.clone() for param in model.parameters()]
        for param in model.parameters():
            nn.init.zeros_(param)
        model.load_state_dict(local)
    for got, expected in zip(model.parameters(), whole, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("before", [True, False])
def test_a_local_state_dict_is_loaded(before: bool) -> None:
    run_ranks(local_state_is_loaded, 2, before)
