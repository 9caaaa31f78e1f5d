"""Models that are sharded and wrapped in every way, for tests of what is saved of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fsdp_ext
from support import models
from support.models import Stack, Subject, Transformer

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Configuration:
    """A model's configuration, as those of transformers. It cannot be written without a text."""

    def __init__(self, text: str | None = "{}") -> None:
        self.text = text

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(self.text)  # type: ignore[arg-type]


class WithBuffers(Stack):
    """A stack with buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("scratch", torch.ones(models.DIM), persistent=False)


# - Ways to shard and to wrap


def sharded(model: Any, shard: Any = fsdp_ext.fully_shard, **arguments: Any) -> Any:
    for unit in model.units():
        shard(unit, **arguments)
    shard(model, **arguments)
    return model


def by_torch(model: Any) -> Any:
    return sharded(model, torch_fully_shard)


def in_columns(model: Any) -> Any:
    """Shard the matrices in dimension 1, which the ranks divide."""

    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else 0)

    return sharded(model, shard_placement_fn=place)


def wrapped(model: Any, **arguments: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fsdp_ext.FullyShardedDataParallel(block, **arguments)
    return fsdp_ext.FullyShardedDataParallel(model, **arguments)


def recomputed_and_compiled(model: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fsdp_ext.fully_shard(checkpoint_wrapper(block))
    return torch.compile(fsdp_ext.fully_shard(model), backend="eager")


def on_mesh(model: Any, **arguments: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return sharded(model, mesh=mesh, **arguments)


def tensor_parallel(model: Any, *, is_sharded: bool = True) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    return sharded(model, mesh=mesh["dp"]) if is_sharded else model


def unchanged(model: Any) -> Any:
    return model


Way = Callable[[Any], Any]
WAYS: dict[str, tuple[type[Subject], Way]] = {
    "several units": (WithBuffers, sharded),
    "a tied head": (Transformer, sharded),
    "nested units": (models.NestedUnits, sharded),
    "a root without parameters": (models.BareRoot, sharded),
    "units of two modules": (models.GroupedModules, sharded),
    "few rows": (models.FewRows, sharded),
    "empty": (models.EmptyParameter, sharded),
    "bf16": (models.InBfloat16, sharded),
    "float64": (models.InFloat64, sharded),
    "mixed precision": (WithBuffers, partial(sharded, mp_policy=BF16)),
    "offloaded": (WithBuffers, partial(sharded, offload_policy=CPUOffloadPolicy())),
    "PyTorch's": (WithBuffers, by_torch),
    "FSDP1": (WithBuffers, partial(wrapped, use_orig_params=True)),
    "FSDP1, flat": (WithBuffers, partial(wrapped, use_orig_params=False)),
    "FSDP1, flat, buffers in bf16": (
        WithBuffers,
        partial(wrapped, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)),
    ),
    "not sharded": (WithBuffers, unchanged),
    "replicated": (WithBuffers, DistributedDataParallel),
    "recomputed and compiled": (WithBuffers, recomputed_and_compiled),
}
WAYS_ON_MESHES: dict[str, tuple[type[Subject], Way]] = {
    "columns": (WithBuffers, in_columns),
    "replicas": (WithBuffers, on_mesh),
    "tensor parallelism": (WithBuffers, tensor_parallel),
    "tensor parallelism alone": (WithBuffers, partial(tensor_parallel, is_sharded=False)),
}


def made(subject: type[Subject], way: Way) -> tuple[Any, dict[str, Tensor]]:
    """Return a sharded model, and the state dict that it had before."""
    torch.manual_seed(0)
    model = subject()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return way(model), state


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert type(got[name]) in (Tensor, nn.Parameter), name
        assert got[name].is_contiguous(), name
        assert torch.equal(got[name], tensor), name


def assert_same(got: Any, expected: Any) -> None:
    """Compare values of any depth."""
    if isinstance(got, DTensor):
        got = got.full_tensor()
    is_parameter = isinstance(got, nn.Parameter) and isinstance(expected, Tensor)
    assert is_parameter or type(got) is type(expected)
    if isinstance(expected, (Tensor, np.ndarray)):
        assert got.dtype == expected.dtype
        equal = torch.equal if isinstance(expected, Tensor) else np.array_equal
        assert equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, models.DIM)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
