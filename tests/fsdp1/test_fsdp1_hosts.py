"""Hybrid sharding without groups or a mesh shards over the ranks of each host, as FSDP1's does."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from support.fsdp1_parity import BY_BLOCK, FSDP, assert_equal, make, torch_fsdp, train
from support.launcher import run_ranks
from support.models import Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

import fsdp_ext
from fsdp_ext.fsdp1 import groups


def _train_by_host() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = (mesh.get_group(1), mesh.get_group(0))
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        options = {"sharding_strategy": strategy, "auto_wrap_policy": BY_BLOCK}
        expected = make(Stack)
        want = train(torch_fsdp(expected, process_group=pair, **options), expected)
        model = make(Stack)
        assert_equal(train(FSDP(model, **options), model), want)
    # Wrapping by hand gives one model the same groups, which FSDP1 cannot and refuses.
    model = make(Stack)
    for number in range(len(model.blocks)):
        model.blocks[number] = FSDP(model.blocks[number], sharding_strategy=strategy)
    wrapped = FSDP(model, sharding_strategy=strategy)
    assert_equal(train(wrapped, model), want)
    sets = [[0, 1], [2, 3]]
    units = [one._fsdp_ext_unit for one in wrapped.fsdp_modules(wrapped)]
    assert [unit.ranks.mesh.mesh.tolist() for unit in units] == [sets] * len(units)


def test_hybrid_strategies_without_groups_shard_over_each_host() -> None:
    run_ranks(_train_by_host, 4)


def _sets_by_host(sizes: list[str], machines: list[str]) -> list[list[int]]:
    os.environ["LOCAL_WORLD_SIZE"] = sizes[dist.get_rank()]
    with mock.patch.object(groups, "machine", return_value=machines[dist.get_rank()]):
        wrapped = fsdp_ext.FullyShardedDataParallel(
            nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD
        )
    sets: list[list[int]] = wrapped._fsdp_ext_unit.ranks.mesh.mesh.tolist()
    return sets


@pytest.mark.parametrize(
    ("sizes", "machines", "sets"),
    [
        (["2", "2", "2", "2"], ["a"] * 4, [[0, 1], [2, 3]]),
        ([""] * 4, ["a", "b", "a", "b"], [[0, 2], [1, 3]]),
        ([""] * 4, ["a"] * 4, [[0, 1, 2, 3]]),
    ],
)
def test_a_launcher_or_the_machine_says_which_ranks_share_a_host(
    sizes: list[str], machines: list[str], sets: list[list[int]]
) -> None:
    assert run_ranks(_sets_by_host, 4, sizes, machines) == [sets] * 4


def _refused_by_host(sizes: list[str], machines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _sets_by_host(sizes, machines)


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    differ = "as many ranks on each host, but the hosts have the ranks"
    for sizes, machines, message in (
        (["2", "2", "2"], ["a"] * 3, differ),
        (["2", "1", "1"], ["a"] * 3, differ),
        ([""] * 3, ["a", "a", "b"], differ),
        (["2", "", ""], ["a", "a", ""], "needs to know which ranks share a host"),
    ):
        run_ranks(_refused_by_host, 3, sizes, machines, message)
