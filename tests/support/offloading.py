"""Offloaded states of optimizers, for tests without a GPU."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp_ext import offload_optimizer
from fsdp_ext.offloading import api as offloading


def offload(optimizer: Optimizer, model: nn.Module, **options: Any) -> None:
    """Offload as if the CPU were a GPU."""
    is_on_host = vars(offloading)["_is_on_host"]
    vars(offloading)["_is_on_host"] = lambda _: False
    try:
        offload_optimizer(optimizer, model, **options)
    finally:
        vars(offloading)["_is_on_host"] = is_on_host
