"""How Lightning's Fabric and Trainer run on the ranks of these tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ecosystem.systems import set_variables_of_torchrun
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from support.parity import device

CPU = torch.device("cpu")


def on_these_ranks() -> dict[str, Any]:
    """Return arguments of Fabric and of the Trainer; let Lightning find this rank's place."""
    set_variables_of_torchrun()
    ranks = dist.get_world_size()
    on_gpu = device().type == "cuda"  # which ranks share
    return {
        "accelerator": device().type,
        "devices": 1 if on_gpu else ranks,
        "num_nodes": ranks if on_gpu else 1,
        "plugins": [TorchElasticEnvironment()],
    }


class Fsdp1OnCpusMixin:
    """Makes a strategy for FSDP1 run on CPUs. Lightning itself runs it on GPUs only."""

    _is_wrapping = False

    @property
    def root_device(self) -> Any:
        # FSDP1 takes its index as the device, and needs one if there are no GPUs.
        return SimpleNamespace(type="cpu", index=CPU) if self._is_wrapping else CPU

    @contextlib.contextmanager
    def wrapping(self) -> Iterator[None]:
        """Let FSDP1 wrap the model in this block."""
        self._is_wrapping = True
        try:
            yield
        finally:
            self._is_wrapping = False
