"""How long do clipping and AdamW take on sharded parameters?

All systems clip and step equal models in turns, on the same gradients of one backward, with one
thread: PyTorch's over DTensors, with foreach and fused; PyTorch's fused one over the flat shards
that `FSDPModule.flat_shard` returns; and `fsdp_ext.clip_grad_norm_` with `fsdp_ext.optim.AdamW`.
With --peers, DeepSpeed's AdamW for the host steps flat shards, too. Clipping starts from the model,
so it includes finding the parameters. The part "both" is clipping and the step after it. On the
host the process group is "fake", so the all-reduce of the norm takes no time; on a GPU it is NCCL
with one rank.

In the rows "host", parameters have few elements, and the time is the host's. In the rows "memory",
parameters have many elements, and the time is the device's. There, "of a copy" is the bandwidth of
a step (AdamW reads four values of each element and writes three) divided by that of a plain copy in
the same process. PyTorch's clipping over flat shards is left out, because the caller would have to
reduce the norm.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_ext
import fsdp_ext.optim
from bench.harness.options import UsageError
from bench.harness.output import print_table
from bench.harness.runner import Keep
from bench.harness.timing import Timing, as_microseconds, time_in_turns, time_on_gpu
from bench.models.peers import deepspeed_cpu_adam

WORLD_SIZE = 8
LAYERS = 8  # linear layers a unit, of two parameters each
OURS = "fsdp_ext"
FLAT = "PyTorch, fused, over flat_shard"
DEEPSPEED = "DeepSpeed, over flat_shard"
SIZES = [("host", 24, 8), ("host", 192, 8), ("memory", 1, 3072)]
TOUCHED = 7  # values of an element that AdamW reads or writes
COPIED = 2

Call = Callable[[], Any]


def sharded(units: int, width: int, device: torch.device) -> Any:
    """Return a sharded model that has run one backward."""
    model: Any = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(units))
    ).to(device)
    for unit in model:
        fsdp_ext.fully_shard(unit)
    fsdp_ext.fully_shard(model)
    model(torch.ones(1, width, device=device)).sum().backward()
    return model


def clip_by_torch(model: nn.Module, max_norm: float) -> None:
    """Clip as PyTorch's users do."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def systems(
    units: int, width: int, device: torch.device, *, peers: bool = False
) -> dict[tuple[str, str], Call]:
    """Return what is timed, by system and part of a step."""
    calls: dict[tuple[str, str], Call] = {}
    kinds: list[tuple[str, type[torch.optim.Optimizer], Any, dict[str, bool]]] = [
        ("PyTorch, foreach", torch.optim.AdamW, clip_by_torch, {"foreach": True}),
        ("PyTorch, fused", torch.optim.AdamW, clip_by_torch, {"fused": True}),
        (OURS, fsdp_ext.optim.AdamW, fsdp_ext.clip_grad_norm_, {}),
    ]
    for name, kind, clip, options in kinds:
        model = sharded(units, width, device)
        optimizer = kind(model.parameters(), lr=1e-4, **options)

        clips = partial(clip, model, 1e9)

        def both(clips: Call = clips, step: Call = optimizer.step) -> None:
            clips()
            step()

        calls[name, "clip"] = clips
        calls[name, "step"] = optimizer.step
        calls[name, "both"] = both
    of_flat: dict[str, Any] = {FLAT: partial(torch.optim.AdamW, fused=True)}
    if peers:
        of_flat[DEEPSPEED] = deepspeed_cpu_adam
    for name, make in of_flat.items():
        model = sharded(units, width, device)
        flat = []
        for unit in model:
            shard, grad = unit.flat_shard()
            flat.append(nn.Parameter(shard))
            flat[-1].grad = grad
        calls[name, "step"] = make(flat, lr=1e-4).step
    return calls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --peers."""
    text = "also step by DeepSpeed's AdamW for the host (make bench-peers installs it)"
    parser.add_argument("--peers", action="store_true", help=text)


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure few and many small parameters, and few large ones."""
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if args.peers and on_gpu:
        raise UsageError("--peers steps parameters on the host; add --device cpu")
    if args.peers and importlib.util.find_spec("deepspeed") is None:
        raise UsageError("--peers needs DeepSpeed; make bench-peers installs it into .venv-peers")
    world_size = 1 if on_gpu else WORLD_SIZE
    if on_gpu:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    repeats = 8 if args.quick else 40
    sizes = [("host", 24, 8), ("memory", 1, 1536)] if args.quick else SIZES
    for limited_by, units, width in sizes:
        calls = systems(units, width, device, peers=args.peers)
        bytes_of_rank = units * LAYERS * (width + 1) * width * 4 // world_size
        if limited_by == "memory":
            source = torch.ones(bytes_of_rank, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            calls["a plain copy", "step"] = partial(target.copy_, source)
        timed = time_on_gpu if on_gpu and limited_by == "memory" else time_in_turns
        seconds = {key: Timing.of(each) for key, each in timed(calls, repeats).items()}
        for (system, part), timing in seconds.items():
            row = {
                "limited_by": limited_by,
                "system": system,
                "part": part,
                "parameters": units * LAYERS * 2,
                "bytes_of_rank": bytes_of_rank,
                "device": device.type,
                "transport": "NCCL with one rank" if on_gpu else "fake",
                "us": as_microseconds(timing),
            }
            fused = seconds.get(("PyTorch, fused", part))
            if fused is not None:
                row["of_fused"] = timing.median / fused.median
            copy = seconds.get(("a plain copy", "step"))
            if copy is not None and part == "step" and system != "a plain copy":
                row["of_copy"] = copy.median / COPIED / (timing.median / TOUCHED)
            keep(row)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = []
    for row in rows:
        us = row["us"]
        table.append(
            [
                row["limited_by"],
                f"{row['parameters']:,}",
                row["part"],
                row["system"],
                f"{us['median']:,.0f}",
                f"{us['low']:,.0f} to {us['high']:,.0f}",
                f"{row['of_fused']:.3f}" if "of_fused" in row else "",
                f"{row['of_copy']:.0%}" if "of_copy" in row else "",
            ]
        )
    print(f"clipping and AdamW, process group: {rows[0]['transport']}, one thread")
    print_table(
        ["limited by", "parameters", "part", "system", "us", "quartiles", "of fused", "of a copy"],
        table,
    )
