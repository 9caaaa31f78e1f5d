"""torchtitan's `parallelize_llama` shards its debug model with fsdp_ext as with FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ecosystem.systems import fsdp_of
from support.launcher import run_ranks
from support.parity import assert_same, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import fsdp_ext

STEPS = 3


def forget_torchtitan() -> None:
    """Let the next import of torchtitan take PyTorch's names anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        del sys.modules[name]


def parallelized(folder: str) -> Any:
    """Return torchtitan's debug model of Llama 3, sharded as its trainer does it."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry, parallelize_llama

    parallel_dims.device_type = "cpu"  # torchtitan itself takes the machine's GPUs, or "cuda"
    parallelism: Any = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    config: Any = model_registry("debugmodel").model
    for layer in config.layers:  # the other kinds of attention need a GPU or a compiler
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states()
    return parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config(),
        dump_folder=folder,
    )


def train(system: str, folder: Path) -> dict[str, Tensor]:
    """Return losses, norms and whole parameters."""
    found: dict[str, Tensor] = {}
    forget_torchtitan()
    try:
        with fsdp_of(system):
            model = parallelized(str(folder / system))
            assert isinstance(model, fsdp_ext.FSDPModule) == (system == "fsdp_ext")
            for module in model.modules():
                if isinstance(module, FSDPModule):  # gloo cannot divide sums, as FSDP2 wants it
                    module.set_force_sum_reduction_for_comms(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                tokens = torch.randint(2048, (2, 33), generator=generator)
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
                )
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found |= {f"loss {step}": loss.detach(), f"norm {step}": whole(norm)}
            return found | {name: whole(param) for name, param in model.named_parameters()}
    finally:
        forget_torchtitan()


def compare(folder: str) -> None:
    theirs, ours = (train(system, Path(folder)) for system in ("torch", "fsdp_ext"))
    assert_same("FSDP2's", theirs, ours)


def test_the_debug_model_trains_as_with_fsdp2(tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path), fresh=True)  # what torchtitan registers stays
