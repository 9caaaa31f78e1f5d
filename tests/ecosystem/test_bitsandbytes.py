"""The optimizers of bitsandbytes over sharded parameters, on the CPU."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from support.launcher import run_ranks
from support.stacks import error_of
from torch import nn

import fsdp_ext


def _errors() -> list[str]:
    errors = []
    for kind in (bitsandbytes.optim.AdamW, bitsandbytes.optim.AdamW8bit):
        for fully_shard in (fsdp_ext.fully_shard, torch.distributed.fsdp.fully_shard):
            model: Any = fully_shard(nn.Linear(256, 256))
            optimizer = kind(model.parameters(), lr=1e-3)
            model(torch.ones(4, 256)).sum().backward()
            errors.append(error_of(optimizer.step))
    return errors


def test_optimizers_refuse_dtensors_as_under_fsdp2() -> None:
    for errors in run_ranks(_errors, 2, fresh=True):
        assert errors[0] == errors[1]
        assert "does not have a sharding strategy registered" in errors[0]
        assert errors[2] == errors[3]
        assert "got mixed torch.Tensor and DTensor" in errors[2]
