"""What any kind of model saves, any other kind loads, on any number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import fsdp_ext
from fsdp_ext import FullyShardedDataParallel, checkpoint, optim
from fsdp_ext.checkpoint import snapshot
from fsdp_ext.optim.state_entries import local_of


class Net(nn.Module):
    """Rows that no number of ranks divides, buffers, tied weights, no elements, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.body(self.embed(tokens)))
        out: Tensor = self.head(hidden)
        return out


Made = tuple[nn.Module, Optimizer]


def adamw(model: nn.Module, kind: Any = torch.optim.AdamW) -> Made:
    body, rest = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            (body if "body" in name else rest).append(param)
    return model, kind([{"params": rest, "lr": 0.01}, {"params": body, "lr": 0.02}])


def unsharded() -> Made:
    return adamw(Net())


def fsdp2(
    shard: Any = torch_fsdp.fully_shard, kind: Any = torch.optim.AdamW, **options: Any
) -> Made:
    model = Net()
    shard(model.body, **options)
    return adamw(shard(model, **options), kind)


def ours() -> Made:
    return fsdp2(fsdp_ext.fully_shard)


def offloaded() -> Made:
    policy = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
    return fsdp2(fsdp_ext.fully_shard, offload_policy=policy)


def flat_optimizer() -> Made:
    return fsdp2(fsdp_ext.fully_shard, optim.AdamW)


def attached() -> Made:
    model, optimizer = fsdp2(fsdp_ext.fully_shard, optim.AdamW)
    optimizer.attach(model)
    return model, optimizer


def with_replicas() -> Made:
    replicas = math.gcd(dist.get_world_size(), 2)
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return fsdp2(fsdp_ext.fully_shard, mesh=mesh)


def by_columns() -> Made:
    return fsdp2(fsdp_ext.fully_shard, shard_placement_fn=_columns)


def _columns(param: nn.Parameter) -> Shard:
    has_columns = param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0
    return Shard(1 if has_columns else 0)


def wrapped_by(wrapper: Any, **options: Any) -> nn.Module:
    model = Net()
    ignored = [model.empty, *model.frozen.parameters()]
    model.body = wrapper(model.body, ignored_states=ignored, **options)
    wrapped: nn.Module = wrapper(model, ignored_states=ignored, **options)
    return wrapped


def fsdp1(use_orig_params: bool = True) -> Made:
    wrapped = wrapped_by(FullyShardedDataParallel, use_orig_params=use_orig_params)
    FullyShardedDataParallel.set_state_dict_type(  # has no effect on checkpoints
        wrapped,
        torch_fsdp.StateDictType.FULL_STATE_DICT,
        torch_fsdp.FullStateDictConfig(rank0_only=True),
        torch_fsdp.FullOptimStateDictConfig(rank0_only=True),
    )
    return adamw(wrapped)


def fsdp1_flat() -> Made:
    return fsdp1(use_orig_params=False)


def torchs_fsdp1(use_orig_params: bool = True) -> Made:
    wrapper = torch_fsdp.FullyShardedDataParallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cpu = torch.device("cpu")
    return adamw(
        wrapped_by(wrapper, use_orig_params=use_orig_params, device_mesh=mesh, device_id=cpu)
    )


def torchs_fsdp1_flat() -> Made:
    return torchs_fsdp1(use_orig_params=False)


def torchs_fsdp1_compiled() -> Made:
    model, optimizer = torchs_fsdp1()
    return torch.compile(model, backend="eager"), optimizer


def ddp() -> Made:
    return adamw(nn.parallel.DistributedDataParallel(Net()))


SAVERS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        unsharded,
        fsdp2,
        ours,
        offloaded,
        flat_optimizer,
        attached,
        with_replicas,
        by_columns,
        fsdp1,
        fsdp1_flat,
        torchs_fsdp1,
        torchs_fsdp1_flat,
        torchs_fsdp1_compiled,
        ddp,
    )
}


def trained(make: Callable[[], Made], seed: int) -> Made:
    """Return a model that has taken two steps."""
    torch.manual_seed(seed)
    model, optimizer = make()
    for step in range(2):
        torch.manual_seed(seed + step)
        model(torch.randint(11, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(made: Made) -> dict[str, Any]:
    """Return all weights and all states of the optimizer, whole, by name."""
    model, optimizer = made
    found = {name: whole(value).clone() for name, value in get_model_state_dict(model).items()}
    saved = checkpoint.state_dicts.optimizer_state(model, [optimizer])
    for name, states in saved["state"].items():
        found |= {f"{name}/{key}": whole(value).clone() for key, value in states.items()}
    for group in saved["groups"]:
        found |= {f"{name}/lr": group["options"]["lr"] for name in group["names"]}
    return found


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(got[name], value), name
            assert got[name].dtype == value.dtype, name
        else:
            assert got[name] == value, name


def _save_all(place: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    states = {}
    for seed, name in enumerate(names):
        made = trained(SAVERS[name], seed)
        states[name] = state_of(made)
        checkpoint.save(place / name, *made, {"rank": dist.get_rank()})
    return states


def _load_all(place: Path, pairs: list[tuple[str, str]], states: dict[str, dict[str, Any]]) -> None:
    for saver, loader in pairs:
        made = trained(SAVERS[loader], 100)
        extra = checkpoint.load(place / saver, *made)
        assert extra == {"rank": dist.get_rank() if dist.get_rank() < 2 else 0}
        assert_equal(state_of(made), states[saver])


def exchange(place: Path, pairs: list[tuple[str, str]], ranks: int) -> None:
    """Save with two ranks, and load on some: pairs of who saves and who loads."""
    states = run_ranks(_save_all, 2, place, list(SAVERS))[0]
    run_ranks(_load_all, ranks, place, pairs, states)


def _collects_without_copies() -> None:
    gathered = (torchs_fsdp1, torchs_fsdp1_flat, torchs_fsdp1_compiled)
    for make in (each for each in SAVERS.values() if each not in gathered):
        model, optimizer = trained(make, 0)
        both = [snapshot.collect(model, [optimizer], None) for _ in range(2)]
        for kind, content in both[0].items():
            for name, tensor in content.tensors.items():
                again = both[1][kind].tensors[name]
                assert local_of(tensor).data_ptr() == local_of(again).data_ptr(), (make, name)


def test_a_save_needs_no_copies_of_what_it_writes() -> None:
    run_ranks(_collects_without_copies, 2)


def test_each_kind_of_model_loads_what_another_kind_saved(tmp_path: Path) -> None:
    kinds = list(SAVERS)
    exchange(tmp_path, list(zip(kinds, kinds[1:] + kinds[:1], strict=True)), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_kind_of_model_loads_what_every_kind_saved(tmp_path: Path, ranks: int) -> None:
    exchange(tmp_path, list(itertools.product(SAVERS, SAVERS)), ranks)
