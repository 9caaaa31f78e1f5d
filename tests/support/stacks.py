"""A small sharded stack of blocks and its step, for tests of `check_every` and `health`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ext import MixedPrecisionPolicy, fully_shard
from support.models import Stack

TRANSPORTS = ("shared_memory", "process_group")
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "gloo": {"transport": "process_group"},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "pieces": {"bucket_bytes": 0, "max_message_bytes": 600},
    "bucket in pieces": {"max_message_bytes": 600},
    "no prefetch": {"prefetch": 0},
}


def sharded(system: Any = fully_shard, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        system(block, **settings)
    return system(model, **settings)


def step(model: Any, number: int = 0) -> Tensor:
    seed = 1 + number * dist.get_world_size() + dist.get_rank()
    (x,), _ = Stack().batch(torch.Generator().manual_seed(seed))
    loss = (model(x).float() - 1).square().mean()
    loss.backward()
    return loss.detach()


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""
