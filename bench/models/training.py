"""The transformer that `step` and `memory` train, and how each system shards it.

Each system has the best settings that its documentation names, and a row lists them.
Each block is a unit, and the rest is the root unit. All systems have fp32 parameters and PyTorch's
AdamW, but for the one that has fsdp_ext.optim's.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt_model import GPT, Block, GPTConfig

LARGE = GPTConfig(vocabulary=50304, context=2048, dim=1792, layers=22, heads=14)
MEDIUM = GPTConfig(vocabulary=2048, context=64, dim=512, layers=6, heads=8)
SMALL = GPTConfig(vocabulary=256, context=64, dim=128, layers=4, heads=4)
WARMUP = 3
STEPS_IN_ROUND = 8  # steps of each system; rows are kept after each round
LEARNING_RATE = 1e-4
KEPT = ", kept gathered"
GLOO = "ours over gloo"
FLAT = "ours, fsdp_ext.optim"
COMPILED = ", compiled blocks"
PREFETCHED = 2  # units that FSDP2 gathers ahead
REDUCE_BUFFERS = 2  # FSDP2's reductions that may be in flight; its docstring recommends 2


@dataclass
class Sharded:
    """A model as one system trains it."""

    model: Any  # called with tokens
    settings: str  # those that differ from the system's defaults
    optimizer: Any = None  # has zero_grad and step; None stands for torch's AdamW
    backward: Callable[[Tensor], object] = Tensor.backward
    autocast: bool = False  # whether forward needs autocast: the system has no mixed precision
    communicates: bool = True


Build = Callable[[GPT, torch.dtype, torch.device], Sharded]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of systems that bring none."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def mesh_of(device: torch.device, replicas: int) -> DeviceMesh:
    """Return the mesh of all ranks: with replicas, a 2-D mesh of shard groups."""
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def _fully_shard(
    fully_shard: Any, model: GPT, dtype: torch.dtype, mesh: DeviceMesh, **settings: Any
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, **settings)
    fully_shard(model, mesh=mesh, mp_policy=policy, **settings)


def _offload_policy(device: torch.device, offload: bool) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()


def shard_ours(
    model: GPT,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: bool = False,
    transport: str | None = None,
    replicas: int = 1,
    offload: bool = False,
    flat_steps: bool = False,
) -> Sharded:
    """Shard with fsdp_ext.

    Args:
        model: to shard.
        dtype: the dtype of the computation.
        device: this rank's device.
        kept: keep parameters gathered after forward.
        transport: the transport of all units; None for the default.
        replicas: how many ranks have the same shard.
        offload: have shards and gradients on the host.
        flat_steps: step with fsdp_ext.optim.
    """
    from fsdp_ext import fully_shard, optim

    policy = _offload_policy(device, offload)
    mesh = mesh_of(device, replicas)
    _fully_shard(fully_shard, model, dtype, mesh, transport=transport, offload_policy=policy)
    settings = ["CPUOffloadPolicy"] if offload else []
    if kept:
        model.set_reshard_after_forward(False)  # type: ignore[operator]
        settings.append("no reshard after forward")
    if transport is not None:
        settings.append(f"transport={transport!r}")
    optimizer = None
    if flat_steps:
        optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        settings.append("fsdp_ext.optim.AdamW")
    return Sharded(model, ", ".join(settings) or "defaults", optimizer)


def shard_fsdp2(
    model: GPT,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: bool = False,
    defaults: bool = False,
    replicas: int = 1,
    offload: bool = False,
) -> Sharded:
    """Shard with PyTorch's FSDP2.

    Args:
        model: to shard.
        dtype: the dtype of the computation.
        device: this rank's device.
        kept: keep parameters gathered after forward.
        defaults: change no setting.
        replicas: how many ranks have the same shard.
        offload: have shards and gradients on the host.
    """
    from torch.distributed.fsdp import fully_shard

    policy = _offload_policy(device, offload)
    _fully_shard(fully_shard, model, dtype, mesh_of(device, replicas), offload_policy=policy)
    if defaults:
        return Sharded(model, "defaults")
    settings = ["CPUOffloadPolicy"] if offload else []
    root: Any = model
    if kept:
        root.set_reshard_after_forward(False)
        settings.append("no reshard after forward")
    units: list[Any] = [root, *model.blocks]
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + PREFETCHED])
        # Backward begins with the head, which is the root's, and ends with the first block.
        before = units[1:i] if i else units[1:]
        unit.set_modules_to_backward_prefetch(before[::-1][:PREFETCHED])
    settings.append(f"explicit prefetch of {PREFETCHED}")
    if device.type == "cpu":  # a CPU has no streams: a gather blocks the host if not asynchronous
        root._set_unshard_async_op(True)
        settings.append("asynchronous unshards")
    if hasattr(root, "set_reduce_scatter_max_input_buffers"):  # torch 2.11 has none
        root.set_reduce_scatter_max_input_buffers(REDUCE_BUFFERS)
        settings.append(f"{REDUCE_BUFFERS} reduce-scatter inputs")
    # One rank has no wire, so gathers and reductions cannot get in each other's way.
    if hasattr(root, "set_separate_reduce_scatter_group") and dist.get_world_size() > 1:
        root.set_separate_reduce_scatter_group()
        settings.append("separate reduce-scatter group")
    return Sharded(model, ", ".join(settings))


def shard_fsdp1(
    model: GPT, dtype: torch.dtype, device: torch.device, *, replicas: int = 1
) -> Sharded:
    """Wrap with PyTorch's FSDP1.

    Args:
        model: to shard.
        dtype: the dtype of the computation.
        device: this rank's device.
        replicas: how many ranks have the same shard.
    """
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    is_hybrid = replicas > 1
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh_of(device, replicas) if is_hybrid else None,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if is_hybrid else None,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        # FSDP1 needs it on a CPU, too: otherwise it looks for an accelerator and fails.
        device_id=device,
        use_orig_params=True,
        forward_prefetch=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    return Sharded(wrapped, "use_orig_params, forward_prefetch, BACKWARD_PRE")


def replicate_ddp(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Wrap with PyTorch's DDP, which keeps a replica on each rank."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    return Sharded(wrapped, "gradient_as_bucket_view, static_graph", autocast=True)


def leave_unsharded(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Let each rank train its own replica, without communication."""
    return Sharded(model, "no communication", autocast=True, communicates=False)


SYSTEMS: dict[str, Build] = {
    "unsharded": leave_unsharded,
    "ours": shard_ours,
    FLAT: partial(shard_ours, flat_steps=True),
    GLOO: partial(shard_ours, transport="process_group"),
    f"ours{KEPT}": partial(shard_ours, kept=True),
    "FSDP2": shard_fsdp2,
    f"FSDP2{KEPT}": partial(shard_fsdp2, kept=True),
    "FSDP2, defaults": partial(shard_fsdp2, defaults=True),
    "FSDP1": shard_fsdp1,
    "DDP": replicate_ddp,
}
OF_ONE_RANK = ("unsharded", "ours", FLAT, "FSDP2", "FSDP1")
WHOLE = ("unsharded", "DDP")  # each rank has the whole model


def systems_for(device: torch.device, ranks: int, replicas: int = 1) -> dict[str, Build]:
    """Return the systems to measure on these ranks, in the order of the tables.

    Args:
        device: the ranks' device.
        ranks: their number.
        replicas: how many ranks have the same shard, for hybrid sharding.
    """
    names = list(OF_ONE_RANK if ranks == 1 else SYSTEMS)
    if device.type != "cpu" and GLOO in names:
        names.remove(GLOO)  # a GPU's process group is NCCL
    return {
        name: SYSTEMS[name] if name in WHOLE else partial(SYSTEMS[name], replicas=replicas)
        for name in names
    }


def with_compiled_blocks(build: Build, backend: str) -> Build:
    """Return a system that compiles each block with torch.compile before it shards the model."""

    def build_compiled(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
        for block in model.blocks:
            block.compile(backend=backend)
        sharded = build(model, dtype, device)
        return replace(sharded, settings=f"{sharded.settings}{COMPILED}")

    return build_compiled


def compiled_systems(builds: dict[str, Build], backend: str) -> dict[str, Build]:
    """Return unsharded, ours and FSDP2, each with and without blocks that the backend compiles."""
    systems: dict[str, Build] = {}
    for name in ("unsharded", "ours", "FSDP2"):
        systems[name] = builds[name]
        systems[name + COMPILED] = with_compiled_blocks(builds[name], backend)
    return systems


def offloaded_systems(builds: dict[str, Build]) -> dict[str, Build]:
    """Return the systems that can offload, each with and without, beside unsharded."""
    systems = {"unsharded": builds["unsharded"]}
    for name in ("ours", GLOO, "FSDP2"):
        if name in builds:
            systems[name] = builds[name]
            systems[f"{name}, offloaded"] = partial(builds[name], offload=True)
    return systems


class Training:
    """A model as one system trains it, with its optimizer and its step."""

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
        self.optimizer = self.sharded.optimizer or adamw(self.model.parameters())
        # All ranks have the same tokens, so that each loss is that of one replica.
        self.tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)

    @staticmethod
    def unsharded_block(config: GPTConfig) -> list[nn.Parameter]:
        """Return the parameters of one unsharded block, on the meta device."""
        with torch.device("meta"):
            return list(Block(config).parameters())

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass."""
        if self.sharded.autocast and self.dtype != torch.float32:
            return torch.autocast(self.device.type, self.dtype)
        return contextlib.nullcontext()

    def step(self) -> Tensor:
        """Run one training step; return the loss."""
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
        """Run a step; return its seconds, the seconds until it was issued, and the loss."""
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = self.step()
        issued = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, issued - start, loss


def run_in_turns(
    trainings: dict[str, Training], steps: int, order: random.Random
) -> dict[str, dict[str, Any]]:
    """Time systems step by step, in turns; return what each step took, by system.

    Args:
        trainings: the systems, the same on all ranks.
        steps: how many steps each system takes.
        order: draws the order of the turns. It needs the same seed on all ranks, because a step is
            a collective.
    """
    taken: dict[str, list[tuple[float, float, torch.Tensor]]] = {name: [] for name in trainings}
    graphs = dict.fromkeys(trainings, 0)
    for _ in range(steps):
        # The order is random: a system finds the caches and threads of the previous one.
        for name in order.sample(list(trainings), len(trainings)):
            before = count_graphs()
            taken[name].append(trainings[name].timed_step())
            graphs[name] += count_graphs() - before
    results = {}
    for name, training in trainings.items():
        seconds = torch.tensor([(whole, host) for whole, host, _ in taken[name]]).double()
        if dist.get_world_size() > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        results[name] = {
            "seconds": seconds[:, 0].tolist(),
            "host_seconds": seconds[:, 1].tolist(),
            "loss": taken[name][-1][2].item(),
            "graphs": graphs[name],
            "parameters": training.parameters,
            "settings": training.sharded.settings,
            "peak_bytes": None,
            "device_bytes": None,
        }
    return results


def count_graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
