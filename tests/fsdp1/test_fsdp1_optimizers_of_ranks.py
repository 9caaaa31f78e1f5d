"""States of optimizers that differ between ranks are saved and loaded as by FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support import models
from support.fsdp1_flat import adamw, train
from support.fsdp1_parity import BY_BLOCK, assert_equal, make
from support.launcher import run_ranks
from torch.distributed.fsdp import StateDictType

from fsdp_ext import FullyShardedDataParallel as FSDP


def sharded_states(use_orig_params: bool) -> None:
    found = []
    for reverses in (False, True):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=use_orig_params)
        params = list(wrapped.parameters())
        optimizer = adamw(params[::-1] if reverses and dist.get_rank() == 1 else params)
        train(wrapped, model, optimizer, steps=1)
        FSDP.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
        states = FSDP.optim_state_dict(wrapped, optimizer)["state"]
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, list(states))
        assert orders[0] == orders[1]
        found.append({name: values["exp_avg"].full_tensor() for name, values in states.items()})
    assert_equal(*found)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_sharded_states_have_one_order_on_all_ranks(use_orig_params: bool) -> None:
    run_ranks(sharded_states, 2, use_orig_params)
