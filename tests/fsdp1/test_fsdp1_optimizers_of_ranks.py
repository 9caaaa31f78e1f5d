"""States of optimizers that differ between ranks are saved and loaded as by FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_flat import WRAPPERS, adamw, train
from support.fsdp1_parity import BY_BLOCK, assert_equal, make
from support.launcher import run_ranks
from support.models import DIM
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.optim import Optimizer

from fsdp_ext import FullyShardedDataParallel as FSDP

# With offload_to_cpu on CPUs, PyTorch 2.13 puts the values of exp_avg_sq into exp_avg, too.
FULL_ON_DEVICE = (
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(),
    FullOptimStateDictConfig(offload_to_cpu=False),
)


def sharded_states(use_orig_params: bool) -> None:
    found = []
    for reverses in (False, True):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=use_orig_params)
        params = list(wrapped.parameters())
        optimizer = adamw(params[::-1] if reverses and dist.get_rank() == 1 else params)
        train(wrapped, model, optimizer, steps=1)
        if reverses and dist.get_rank() == 1:
            for param, values in optimizer.state.items():
                optimizer.state[param] = dict(reversed(values.items()))
        FSDP.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
        states = FSDP.optim_state_dict(wrapped, optimizer)["state"]
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, [(name, list(values)) for name, values in states.items()])
        assert orders[0] == orders[1]
        found.append({name: values["exp_avg"].full_tensor() for name, values in states.items()})
    assert_equal(*found)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_sharded_states_have_one_order_on_all_ranks(use_orig_params: bool) -> None:
    run_ranks(sharded_states, 2, use_orig_params)


class Partial(nn.Module):
    """A wrapper beside a plain module, as TorchRec's tables, that only some ranks have."""

    def __init__(self, wrap: Any, has_table: bool, use_orig_params: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if has_table:
            self.add_module(f"table_{dist.get_rank()}", nn.Linear(DIM, DIM))
        torch.manual_seed(1)
        self.dense = wrap(nn.Linear(DIM, DIM), use_orig_params=use_orig_params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x

    def train_step(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        self(torch.ones(3, DIM)).square().sum().backward()
        optimizer.step()


def flat(saved: dict[str, Any]) -> dict[str, Any]:
    states = saved["state"].items()
    return {f"{name}.{key}": value for name, of in states for key, value in of.items()}


def partial_states(with_tables: tuple[int, ...]) -> None:
    has_table = dist.get_rank() in with_tables
    found = []
    for wrap in WRAPPERS:
        model = Partial(wrap, has_table, use_orig_params=True)
        kind: Any = type(model.dense)
        optimizer = adamw(model.parameters())
        model.train_step(optimizer)
        model.train_step(optimizer)
        kind.set_state_dict_type(model, *FULL_ON_DEVICE)
        saved = kind.optim_state_dict(model, optimizer)
        names = {name.partition(".")[0] for name in saved["state"]}
        assert names == {"dense", f"table_{dist.get_rank()}"} if has_table else {"dense"}

        loaded = adamw(model.parameters())
        loaded.load_state_dict(kind.optim_state_dict_to_load(model, loaded, saved))
        assert_equal(flat(kind.optim_state_dict(model, loaded)), flat(saved))
        model.train_step(loaded)
        found.append(flat(kind.optim_state_dict(model, loaded)))
    assert_equal(*found)


@pytest.mark.parametrize("with_tables", [(1,), (0,), (0, 1)], ids=str)
def test_each_rank_keeps_the_states_of_its_plain_parameters(with_tables: tuple[int, ...]) -> None:
    run_ranks(partial_states, 2, with_tables)


def partial_states_beside_flat_parameters(with_table: int) -> None:
    for wrap in WRAPPERS:
        model = Partial(wrap, dist.get_rank() == with_table, use_orig_params=False)
        kind: Any = type(model.dense)
        optimizer = adamw(model.parameters())
        model.train_step(optimizer)
        kind.set_state_dict_type(model, *FULL_ON_DEVICE)
        if with_table == 0:
            with pytest.raises(RuntimeError, match="some ranks are missing some of those states"):
                kind.optim_state_dict(model, optimizer)
        else:
            saved = kind.optim_state_dict(model, optimizer)["state"]
            assert sorted(saved) == ["dense.bias", "dense.weight"]


@pytest.mark.parametrize("with_table", [0, 1])
def test_rank_0_decides_beside_flat_parameters(with_table: int) -> None:
    run_ranks(partial_states_beside_flat_parameters, 2, with_table)
