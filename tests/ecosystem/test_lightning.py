"""Lightning Fabric trains with fsdp_ext as with PyTorch's FSDP, once it is patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ecosystem.families import subject
from ecosystem.lightnings import Fsdp1OnCpusMixin, on_these_ranks
from ecosystem.systems import fsdp_of
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from support.launcher import run_ranks
from support.parity import EXACT, ROUNDING, Tolerance, assert_same, moved, whole
from torch import Tensor, nn

import fsdp_ext

STEPS = 4


def parallelize(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for unit in model.units():
        fully_shard(unit, mesh=mesh["data_parallel"])
    module: nn.Module = fully_shard(model, mesh=mesh["data_parallel"])
    return module


class Fsdp1OnCpus(Fsdp1OnCpusMixin, FSDPStrategy):
    """Fabric's strategy for FSDP1."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        with self.wrapping():
            return super().setup_module(module)


def fabric(strategy: Any, **options: Any) -> Fabric:
    """Return Fabric over the ranks of this test."""
    made = Fabric(strategy=strategy, **on_these_ranks(), **options)
    made.launch()
    return made


def train(trainer: Fabric, folder: Path | None) -> tuple[Any, dict[str, Tensor]]:
    """Return the set up model, and losses and norms.

    In the middle, the state is saved to the folder and loaded again, if there is a folder.
    """
    torch.manual_seed(0)
    inner = subject("llama")
    model = trainer.setup_module(inner)
    optimizer = trainer.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = {}
    for step in range(STEPS):
        for micro in range(2):
            seed = 100 * (2 * step + micro) + dist.get_rank()
            _, batch = moved(inner.batch(torch.Generator().manual_seed(seed)))
            with trainer.no_backward_sync(model, enabled=micro == 0):
                loss = model(**batch).loss
                trainer.backward(loss)
            found[f"loss {step}.{micro}"] = loss.detach()
        norm = trainer.clip_gradients(model, optimizer, max_norm=1.0)
        found[f"norm {step}"] = whole(norm)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and folder is not None:
            state = {"model": model, "optimizer": optimizer, "step": step}
            trainer.save(folder, state)
            spoil(model.parameters(), optimizer)
            trainer.load(folder, state)
            assert state["step"] == step
    return model, found


@torch.no_grad()
def spoil(params: Any, optimizer: Any) -> None:
    for param in params:
        param.mul_(0.5)
        for value in optimizer.state[param].values():
            value.mul_(0.5)


def train_as_fsdp2(system: str, folder: Path) -> dict[str, Tensor]:
    ranks = dist.get_world_size()
    with fsdp_of(system, clips=True):
        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=ranks, tensor_parallel_size=1
        )
        model, found = train(fabric(strategy), folder / system)
        inner = model.module
        assert isinstance(inner, fsdp_ext.FSDPModule) == (system == "fsdp_ext")
        return found | {name: whole(param) for name, param in inner.named_parameters()}


def compare_fsdp2(folder: str) -> None:
    theirs, ours = (train_as_fsdp2(system, Path(folder)) for system in ("torch", "fsdp_ext"))
    assert_same("PyTorch's", theirs, ours, ROUNDING[torch.float32])  # norms agree up to rounding


def test_fabric_accumulates_clips_saves_and_loads_as_with_fsdp2(tmp_path: Path) -> None:
    run_ranks(compare_fsdp2, 2, str(tmp_path))


def train_as_fsdp1(
    system: str, precision: Any, folder: Path | None, **options: Any
) -> dict[str, Tensor]:
    with fsdp_of(system):
        strategy = Fsdp1OnCpus(auto_wrap_policy={type(subject("llama").units()[0])}, **options)
        model, found = train(fabric(strategy, precision=precision), folder)
        is_ours = isinstance(model._forward_module, fsdp_ext.FullyShardedDataParallel)
        assert is_ours == (system == "fsdp_ext")
        return found


def compare_fsdp1(precision: str, options: dict[str, Any], folder: str) -> None:
    # PyTorch's FSDP1 crashes in state dicts that are offloaded from the CPU, so it saves nothing.
    theirs = train_as_fsdp1("torch", precision, None, **options)
    ours = train_as_fsdp1("fsdp_ext", precision, None, **options)
    # FSDP1 adds up norms in another order, and gradients are scaled by them.
    rounding = Tolerance(1e-6, 0.0) if precision == "32-true" else ROUNDING[torch.bfloat16]
    assert_same("PyTorch's", theirs, ours, rounding)
    saved = train_as_fsdp1("fsdp_ext", precision, Path(folder) / "checkpoint", **options)
    assert_same("without saving", ours, saved, EXACT)


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        pytest.param("32-true", {"state_dict_type": "full"}, id="full states"),
        pytest.param("bf16-mixed", {"state_dict_type": "sharded"}, id="bf16, sharded states"),
        pytest.param(
            "32-true", {"state_dict_type": "full", "use_orig_params": False}, id="flat, full states"
        ),
        pytest.param(
            "32-true", {"state_dict_type": "sharded", "use_orig_params": False}, id="flat, sharded"
        ),
    ],
)
def test_fabric_accumulates_clips_saves_and_loads_as_with_fsdp1(
    precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(compare_fsdp1, 2, precision, options, str(tmp_path))
