"""Models with flat parameters, of `FullyShardedDataParallel` and of FSDP1, and how they train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter as TorchFlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsdp_ext import FullyShardedDataParallel as FSDP
from support.fsdp1_parity import Values, run
from support.models import Subject
from support.parity import device


def torchs(module: nn.Module, **kwargs: Any) -> TorchFSDP:
    return TorchFSDP(module, device_id=device(), **kwargs)


WRAPPERS: tuple[Callable[..., Any], ...] = (FSDP, torchs)


def flat_of(wrapped: nn.Module) -> list[nn.Parameter]:
    return [param for param in wrapped.parameters() if isinstance(param, TorchFlatParameter)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def train(
    wrapped: Any,
    model: Subject,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 4,
    first: int = 0,
    accumulates: bool = True,
) -> Values:
    """Train, with two micro-batches in every second step, and return losses and parameters."""
    losses: Values = {}
    for step in range(first, first + steps):
        optimizer.zero_grad(set_to_none=step != 2)
        if accumulates:
            with wrapped.no_sync() if step % 2 else contextlib.nullcontext():
                run(wrapped, model, step + 100).backward()
        loss = run(wrapped, model, step)
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses | wrapped.state_dict()
