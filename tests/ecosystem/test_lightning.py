"""Lightning Fabric trains with fsdp_ext as with FSDP2, once it is patched."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ecosystem.families import subject
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from support.launcher import run_ranks
from support.parity import assert_same, whole
from torch import Tensor, nn

import fsdp_ext

STEPS = 4


@contextlib.contextmanager
def fsdp_of(system: str) -> Iterator[None]:
    """Let imports of PyTorch's FSDP give a system's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fsdp_ext.patch() if system == "fsdp_ext" else contextlib.nullcontext():
            yield


def parallelize(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for unit in model.units():
        fully_shard(unit, mesh=mesh["data_parallel"])
    module: nn.Module = fully_shard(model, mesh=mesh["data_parallel"])
    return module


def fabric() -> Fabric:
    """Return Fabric over the ranks of this test."""
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
    ranks = dist.get_world_size()
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    return Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
    )


def train(system: str, folder: Path) -> dict[str, Tensor]:
    """Return losses, norms and the whole parameters at the end."""
    found = {}
    with fsdp_of(system):
        trainer = fabric()
        trainer.launch()
        torch.manual_seed(0)
        inner = subject("llama")
        model = trainer.setup_module(inner)
        optimizer = trainer.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        assert isinstance(inner, fsdp_ext.FSDPModule) == (system == "fsdp_ext")
        for step in range(STEPS):
            for micro in range(2):
                seed = 100 * (2 * step + micro) + dist.get_rank()
                _, batch = inner.batch(torch.Generator().manual_seed(seed))
                with trainer.no_backward_sync(model, enabled=micro == 0):
                    loss = model(**batch).loss
                    trainer.backward(loss)
                found[f"loss {step}.{micro}"] = loss.detach()
            norm = trainer.clip_gradients(model, optimizer, max_norm=1.0)
            found[f"norm {step}"] = whole(norm)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                state = {"model": model, "optimizer": optimizer, "step": step}
                trainer.save(folder / system, state)
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
                trainer.load(folder / system, state)
                assert state["step"] == step
        return found | {name: whole(param) for name, param in inner.named_parameters()}


def compare(folder: str) -> None:
    theirs, ours = (train(system, Path(folder)) for system in ("torch", "fsdp_ext"))
    assert_same("PyTorch's", theirs, ours)


def test_fabric_accumulates_clips_saves_and_loads_as_with_fsdp2(tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path))
