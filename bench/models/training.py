"""The transformer that step and memory train, and how each system shards it.

Each system has the best settings that its documentation names; what they are is part of a row.
A block is a unit, and what is left the root unit. fp32 parameters and AdamW everywhere.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt_model import GPT, Block, GPTConfig

LARGE = GPTConfig(vocabulary=50304, context=2048, dim=1792, layers=22, heads=14)
MEDIUM = GPTConfig(vocabulary=2048, context=64, dim=512, layers=6, heads=8)
SMALL = GPTConfig(vocabulary=256, context=64, dim=128, layers=4, heads=4)
WARMUP = 3
KEPT = ", kept gathered"
PREFETCHED = 2  # units ahead, of FSDP2
REDUCE_BUFFERS = 2  # inputs of FSDP2's reductions that may be in flight; its docstring says 2


@dataclass
class Sharded:
    """A model as one system trains it."""

    model: Any  # called with tokens
    settings: str  # that differ from the system's defaults
    optimizer: Any = None  # has zero_grad and step; AdamW of torch's if none is given
    backward: Callable[[Tensor], object] = Tensor.backward
    autocast: bool = False  # the system has no mixed precision of its own


Build = Callable[[GPT, torch.dtype, torch.device], Sharded]


def adamw(parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer that all systems have."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")


def _fully_shard(fully_shard: Any, model: GPT, dtype: torch.dtype, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_ours(
    model: GPT, dtype: torch.dtype, device: torch.device, *, kept: bool = False
) -> Sharded:
    """Shard with fsdp_ext; `kept`: no reshard after forward."""
    from fsdp_ext import fully_shard

    _fully_shard(fully_shard, model, dtype, device)
    if kept:
        model.set_reshard_after_forward(False)  # type: ignore[operator]
    return Sharded(model, "no reshard after forward" if kept else "defaults")


def shard_fsdp2(
    model: GPT,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: bool = False,
    defaults: bool = False,
) -> Sharded:
    """Shard with PyTorch's FSDP2; `kept`: no reshard after forward; `defaults`: as it comes."""
    from torch.distributed.fsdp import fully_shard

    _fully_shard(fully_shard, model, dtype, device)
    if defaults:
        return Sharded(model, "defaults")
    settings = []
    root: Any = model
    if kept:
        root.set_reshard_after_forward(False)
        settings.append("no reshard after forward")
    units: list[Any] = [root, *model.blocks]
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + PREFETCHED])
        # Backward begins in the root, by its head, and comes to the first block last.
        before = units[1:i] if i else units[1:]
        unit.set_modules_to_backward_prefetch(before[::-1][:PREFETCHED])
    settings.append(f"explicit prefetch of {PREFETCHED}")
    if device.type == "cpu":  # without streams a gather blocks the host, unless it is asynchronous
        root._set_unshard_async_op(True)
        settings.append("asynchronous unshards")
    if hasattr(root, "set_reduce_scatter_max_input_buffers"):  # torch 2.11 has none
        root.set_reduce_scatter_max_input_buffers(REDUCE_BUFFERS)
        settings.append(f"{REDUCE_BUFFERS} reduce-scatter inputs")
    # A group of one rank has no wire that reductions and gathers could share.
    if hasattr(root, "set_separate_reduce_scatter_group") and dist.get_world_size() > 1:
        root.set_separate_reduce_scatter_group()
        settings.append("separate reduce-scatter group")
    return Sharded(model, ", ".join(settings))


def shard_fsdp1(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Wrap with PyTorch's FSDP1."""
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        # Said for a CPU too: without it FSDP1 looks for an accelerator and fails.
        device_id=device,
        use_orig_params=True,
        forward_prefetch=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    return Sharded(wrapped, "use_orig_params, forward_prefetch, BACKWARD_PRE")


def replicate_ddp(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Wrap with PyTorch's DDP, which replicates."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    return Sharded(wrapped, "gradient_as_bucket_view, static_graph", autocast=True)


def leave_unsharded(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Let each rank train a replica by itself."""
    return Sharded(model, "no communication", autocast=True)


SYSTEMS: dict[str, Build] = {
    "unsharded": leave_unsharded,
    "ours": shard_ours,
    "FSDP2": shard_fsdp2,
    "FSDP1": shard_fsdp1,
}
# Of several ranks, besides: other settings, and who does not shard.
MORE: dict[str, Build] = {
    f"ours{KEPT}": partial(shard_ours, kept=True),
    f"FSDP2{KEPT}": partial(shard_fsdp2, kept=True),
    "FSDP2, defaults": partial(shard_fsdp2, defaults=True),
    "DDP": replicate_ddp,
}


class Training:
    """One system's model and optimizer, and its step."""

    def __init__(self, build: Build, config: GPTConfig, batch: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(config)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.sharded = build(model, self.dtype, device)
        self.model: nn.Module = self.sharded.model
        self.optimizer = self.sharded.optimizer or adamw(self.model.parameters(), device)
        # The same tokens on all ranks, so that losses are those of a replica.
        self.tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)

    @staticmethod
    def unsharded_block(config: GPTConfig) -> list[nn.Parameter]:
        """Return the parameters of a block, without memory."""
        with torch.device("meta"):
            return list(Block(config).parameters())

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        if self.sharded.autocast and self.dtype != torch.float32:
            return torch.autocast(self.device.type, self.dtype)
        return contextlib.nullcontext()

    def step(self) -> Tensor:
        """Run one; return the loss."""
        self.optimizer.zero_grad()
        with self.forward_context():
            logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(
            logits.float().view(-1, self.config.vocabulary), self.tokens.view(-1)
        )
        self.sharded.backward(loss)
        self.optimizer.step()
        return loss.detach()

    def timed_step(self) -> tuple[float, float, Tensor]:
        """Return the seconds of a step, those until it is issued, and the loss."""
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = self.step()
        issued = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, issued - start, loss
