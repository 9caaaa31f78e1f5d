"""Errors contain the words of FSDP2's that scripts match."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.messages import check_message
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from fsdp_ext import fully_shard

Shards = Callable[..., Any]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar_p = nn.Parameter(torch.tensor(1.0))


def scalar(shard: Shards) -> None:
    shard(Scalar())


def twice(shard: Shards) -> None:
    shard(shard(nn.Linear(2, 2)))


def copied(shard: Shards) -> None:
    copy.deepcopy(shard(nn.Linear(2, 2)))


def uneven(shard: Shards) -> None:
    shard(nn.Linear(17, 4, bias=False), shard_placement_fn=lambda param: Shard(1))


def no_dimension(shard: Shards) -> None:
    shard(nn.LayerNorm(4), shard_placement_fn=lambda param: Shard(1))


def on_meta(shard: Shards) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    shard(model)(torch.ones(1, 2))


def container(shard: Shards) -> None:
    shard(nn.ModuleList([nn.Linear(2, 2)]))


def three_dimensions(shard: Shards) -> None:
    shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")))


def layer_first(shard: Shards) -> None:
    model = nn.Sequential(shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0](torch.ones(1, 2))
    shard(model)(torch.ones(1, 2))


def root_of_two(shard: Shards) -> None:
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    shard(pair)
    pair[0](torch.ones(1, 2))


PATTERNS: list[tuple[type[Exception], str, Callable[[Shards], None]]] = [
    (ValueError, "Change scalar_p to a 1D tensor with numel equal to 1.", scalar),
    (AssertionError,
     "Each distinct composable distributed API can only be applied to a module once.", twice),
    (AssertionError, "FSDP does not support deepcopy", copied),
    (NotImplementedError, "FSDP does not support uneven sharding on dim 1", uneven),
    (AssertionError, "Shard dim 1 is invalid for 1D tensor", no_dimension),
    (
        RuntimeError,
        "FSDP parameters should be materialized from meta device before training, but the "
        r"following were still on meta device: \['0.weight', '0.bias', '1.weight'\]",
        on_meta,
    ),
    (ValueError, r"fully\_shard does not support containers that do not implement forward",
     container),
    (ValueError, r"fully\_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
     three_dimensions),
    (
        RuntimeError,
        "^FSDP state has already been lazily initialized for 0\nFSDP requires running forward "
        "through the root module first",
        layer_first,
    ),
    (RuntimeError, "^FSDP requires a single root module but got ", root_of_two),
]  # fmt: skip


def messages() -> None:
    for kind, pattern, mistake in PATTERNS:
        for shard in (torch_fully_shard, fully_shard):
            check_message(kind, pattern, functools.partial(mistake, shard))


def test_messages_contain_those_of_fsdp2() -> None:
    run_ranks(messages, 2)


# - In a notebook


def lines_of_message() -> None:
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="needs a process group") as caught:
        fully_shard(nn.Linear(2, 2))
    lines = str(caught.value).splitlines()[-2:]
    assert lines[0] == "import torch.distributed as dist"
    exec("\n".join(lines))
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()  # type: ignore[operator]
    assert dist.get_world_size() == 1
    assert all(param.grad is not None for param in model.parameters())  # type: ignore[attr-defined]


def test_the_lines_in_the_message_make_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    run_ranks(lines_of_message, 1, fresh=True)


def saved_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    for save in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises(
            pickle.PicklingError, match=r"Save its state dict .*model.state_dict\(\)"
        ):
            save()
    torch.save(model.state_dict(), io.BytesIO())
    assert type(copy.copy(model)) is nn.Sequential
    with pytest.raises(ValueError, match="in a notebook, first run the code that makes the model"):
        fully_shard(model[0])
    model(torch.ones(1, 4)).sum().backward()


def test_saving_a_sharded_model_or_sharding_it_again_says_what_to_do() -> None:
    run_ranks(saved_whole, 2)
