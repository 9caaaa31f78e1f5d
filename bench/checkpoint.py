"""How long do saving and loading a checkpoint take, and how long does training wait?

Ranks save and load a GPT with AdamW (weights and two moments, float32), in turns, into the same
directory: fsdp_ext.checkpoint; torch.distributed.checkpoint (DCP), whose async_save runs in a
thread, in a process, or in a thread that also makes the copies ("async staging"); and torch.save of
the full state on rank 0. They export the weights in the layout of Hugging Face:
fsdp_ext.checkpoint, and safetensors on rank 0 of what get_model_state_dict gathers. "plain" writes
the same bytes in large pieces, each rank its own, and reads them. Every write ends with the bytes
on the disk (fsync; DCP's sync_files), and files are dropped from the page cache before they are
read.

"blocked" is how long training waits. For saves, loads and exports that is the call. async_save
leaves copies to a thread, and the next step of the optimizer has to wait for them. So gradients
exist already when it is called, and the optimizer steps at once. "blocked" is the time of the call,
of DCP's wait for its staging and of this step, minus that of a step without a checkpoint in the
same round. This is the longest wait for copies. A training loop can lose more, because copies
compete with forward and backward for the cores: "slows a step" is a forward, a backward and a step
after async_save, minus the same without it. "total" ends when the checkpoint is complete, and
includes the step.

The slowest rank counts. "of plain" is the bandwidth divided by that of "plain". "memory" is by how
much the peak of a rank's resident memory rose, also in a model's first round, which counts for
nothing else. A round with a small model comes before all others, so that "memory" is not what first
calls cost. "a step" is one step of training, for comparison. All ranks but the last one save and
load; "load by more ranks" loads the same files on all of them. With --ranks 1, one rank saves and
loads, and "load by more ranks" is left out. --device cuda needs --ranks 1, and its --quick measures
the model of 21 M parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh

import fsdp_ext
from bench.harness import ranks
from bench.harness.options import UsageError
from bench.harness.output import print_table
from bench.harness.runner import Keep
from bench.harness.timing import INDISTINCT, Timing, as_microseconds, includes_zero
from bench.models.training import GPT, MEDIUM, SMALL, GPTConfig
from fsdp_ext import checkpoint

RANKS = 3
LARGE = GPTConfig(vocabulary=8192, context=64, dim=1024, layers=15, heads=16)  # 206 M parameters
PIECE = 8 << 20
OURS = "fsdp_ext"
FIGURES = ("blocked_us", "slows_step_us", "total_us")
Key = tuple[str, str]  # the system and what it does


def nothing() -> None:
    pass


class Saving(NamedTuple):
    """A checkpoint that is being written: waits until it is complete, and until a step may run."""

    wait: Callable[[], Any]
    wait_for_staging: Callable[[], Any] = nothing


class Training:
    """A model with its optimizer after one step, sharded over some of the ranks."""

    def __init__(self, config: GPTConfig, group: dist.ProcessGroup, device: torch.device) -> None:
        torch.manual_seed(0)
        model = GPT(config).to(device)
        mesh = DeviceMesh.from_group(group, device.type)
        for block in model.blocks:
            fsdp_ext.fully_shard(block, mesh=mesh)
        self.model: Any = fsdp_ext.fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(config.vocabulary, (4, config.context), device=device)
        self.group = group
        self.device = device
        self.backward()
        self.step()
        self.parameters = sum(param.numel() for param in self.model.parameters())
        self.nbytes = 3 * 4 * self.parameters

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens).square().mean().backward()
        self.finish()

    def step(self) -> None:
        self.optimizer.step()
        self.finish()

    def finish(self) -> None:
        """Wait for a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self, **options: bool) -> dict[str, Any]:
        weights, moments = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(**options)
        )
        return {"model": weights, "optimizer": moments}

    def set_state(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


# - Saving


def save_ours(training: Training, place: Path) -> None:
    checkpoint.save(place, training.model, training.optimizer, process_group=training.group)


def save_ours_async(training: Training, place: Path) -> Saving:
    saving = checkpoint.async_save(
        place, training.model, training.optimizer, process_group=training.group
    )
    return Saving(saving.result)


def save_dcp(training: Training, place: Path) -> None:
    dcp.save(training.state(), checkpoint_id=place, process_group=training.group)


def save_dcp_async(options: dict[str, Any], training: Training, place: Path) -> Saving:
    saving = dcp.async_save(
        training.state(), checkpoint_id=place, process_group=training.group, **options
    )
    if isinstance(saving, AsyncSaveResponse):
        return Saving(saving.upload_completion.result, saving.staging_completion.result)
    return Saving(saving.result)


def stager_for(device: torch.device) -> DefaultStager:
    """Return what copies for DCP in a thread. Its other settings need a GPU."""
    on_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=on_gpu,
            use_async_staging=True,
            use_non_blocking_copy=on_gpu,
        )
    )


def save_full(training: Training, place: Path) -> None:
    state = training.state(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        place.mkdir()
        with (place / "full.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier(group=training.group)


def write_plain(parts: int, training: Training, place: Path) -> None:
    """Write as many bytes as the parameters (1 part), or these and the moments (3 parts)."""
    place.mkdir(exist_ok=True)
    piece = memoryview(os.urandom(1 << 16) * (PIECE >> 16))
    remaining = parts * 4 * training.parameters // training.group.size()
    with (place / str(dist.get_rank())).open("wb", buffering=0) as file:
        while remaining > 0:
            remaining -= file.write(piece[:remaining])
        os.fsync(file.fileno())
    dist.barrier(group=training.group)


def export_ours(training: Training, place: Path) -> None:
    # A limit with which each rank writes one file.
    largest = 4 * training.parameters // training.group.size() + (1 << 20)
    checkpoint.export(training.model, place, largest, process_group=training.group)


def export_full(training: Training, place: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(training.model, options=options)
    if dist.get_rank() == 0:
        place.mkdir()
        save_file(weights, place / "model.safetensors")
        file = os.open(place / "model.safetensors", os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    dist.barrier(group=training.group)


# - Loading


def load_ours(training: Training, place: Path) -> None:
    checkpoint.load(place, training.model, training.optimizer, process_group=training.group)


def load_dcp(training: Training, place: Path) -> None:
    state = training.state()
    dcp.load(state, checkpoint_id=place, process_group=training.group)
    training.set_state(state)


def load_plain(training: Training, place: Path) -> None:
    piece = bytearray(PIECE)
    with (place / str(dist.get_rank())).open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass
    dist.barrier(group=training.group)


# - Measuring


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Save and load with all systems in turns."""
    if args.device == "cuda" and args.ranks != 1:
        raise UsageError("--device cuda measures one rank; add --ranks 1")
    device = ranks.join(args.device)
    savers = dist.new_group(list(range(max(1, dist.get_world_size() - 1))))
    sizes = [("21 M", MEDIUM), ("200 M", LARGE)]
    if args.quick:
        sizes = sizes[:1] if args.device == "cuda" else [("tiny", SMALL)]
    with shared_directory() as directory:  # warms up
        run_rounds(SMALL, savers, device, directory, 1)
    for size, config in sizes:
        with shared_directory() as directory:
            rounds = run_rounds(config, savers, device, directory, 3 if args.quick else 6)
            if dist.get_rank() == 0:
                for row in as_rows(rounds, device):
                    keep({"size": size, **row})


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """Make a temporary directory that all ranks use."""
    names = [tempfile.mkdtemp(prefix="fsdp_ext-bench-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


@dataclass
class Rounds:
    """The figures of each round, in seconds and bytes, for one size of model.

    Args:
        nbytes: bytes of the weights and the moments.
        taken: of each call, what `timed` returns.
        slowed: of each async_save, by how much it slowed a step.
        steps: steps without a checkpoint.
    """

    nbytes: int = 0
    taken: defaultdict[Key, list[tuple[float, ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    slowed: defaultdict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[float] = field(default_factory=list)


def run_rounds(
    config: GPTConfig, savers: Any, device: torch.device, directory: Path, count: int
) -> Rounds:
    """Save and load one size of model.

    ``savers`` are all ranks but the last one, or the only one.
    """
    world = dist.group.WORLD
    assert world is not None
    rounds = Rounds()
    training = None
    if savers is not dist.GroupMember.NON_GROUP_MEMBER:
        training = Training(config, savers, device)
        rounds.nbytes = training.nbytes
        calls = calls_on(device)
    for _ in range(count):
        if training is not None:
            run_round(training, calls, directory, rounds)
        dist.barrier()  # all rounds together may take longer than a collective may wait
    if world.size() > 1:
        more = Training(config, world, device)
        for system, call in ((OURS, load_ours), ("DCP", load_dcp)):
            for _ in range(count):
                make_ready("load", directory / system, world)
                taken = timed(partial(call, more, directory / system), more)
                rounds.taken[system, "load by more ranks"].append(taken)
    return rounds


def calls_on(device: torch.device) -> dict[Key, Any]:
    """Return the calls of a round, in their order."""
    return {
        ("plain", "save"): partial(write_plain, 3),
        (OURS, "save"): save_ours,
        (OURS, "async_save"): save_ours_async,
        ("DCP", "save"): save_dcp,
        ("DCP, thread", "async_save"): partial(save_dcp_async, {}),
        ("DCP, process", "async_save"): partial(
            save_dcp_async, {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        ),
        ("DCP, async staging", "async_save"): partial(
            save_dcp_async, {"async_stager": stager_for(device)}
        ),
        ("torch.save", "save"): save_full,
        ("plain", "load"): load_plain,
        (OURS, "load"): load_ours,
        ("DCP", "load"): load_dcp,
        ("plain", "export"): partial(write_plain, 1),
        (OURS, "export"): export_ours,
        ("get_model_state_dict", "export"): export_full,
    }


def run_round(training: Training, calls: dict[Key, Any], directory: Path, rounds: Rounds) -> None:
    """Train a step, and do each call."""
    dist.barrier(group=training.group)
    start = time.perf_counter()
    training.backward()
    computed = time.perf_counter()
    training.step()
    stepped = time.perf_counter()
    rounds.steps.append(stepped - start)
    for (system, action), call in calls.items():
        place = directory / (f"{system}, exported" if action == "export" else system)
        here = partial(call, training, place)
        make_ready(action, place, training.group)
        rounds.taken[system, action].append(timed(here, training, stepped - computed))
        if action == "async_save":
            make_ready(action, place, training.group)
            slows, *_ = timed(here, training, stepped - start, has_backward=True)
            rounds.slowed[system, action].append(slows)


def make_ready(action: str, place: Path, group: dist.ProcessGroup) -> None:
    """Remove what an earlier call wrote, or drop what is to be read from the page cache."""
    if action == "load":
        drop_from_cache(place)
    elif dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
    dist.barrier(group=group)


def timed(
    call: Callable[[], Saving | None],
    training: Training,
    without_save: float = 0.0,
    has_backward: bool = False,
) -> Any:
    """Return the blocked and the total seconds, and the rise of the peak memory, of all ranks.

    Args:
        call: saves or loads.
        training: has gradients.
        without_save: how long what follows an async_save takes without it.
        has_backward: a forward and a backward come before the step.
    """
    before = ranks.memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    training.finish()
    start = time.perf_counter()
    saving = call()
    if saving is not None:
        if has_backward:
            training.backward()
        saving.wait_for_staging()
        training.step()
    blocked = time.perf_counter() - start
    if saving is not None:
        blocked -= without_save
        saving.wait()
    total = time.perf_counter() - start
    figures = torch.tensor([blocked, total, ranks.memory("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX, group=training.group)
    return tuple(figures.tolist())


def drop_from_cache(directory: Path) -> None:
    """Drop the files in a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def as_rows(rounds: Rounds, device: torch.device) -> Iterator[dict[str, Any]]:
    """Return the rows of one size of model.

    The first round counts only for memory: what it allocates may be kept.
    """
    plain = {
        action: Timing.of([total for _, total, _ in rounds.taken["plain", action][1:]]).median
        for action in ("save", "load", "export")
    }
    weights = rounds.nbytes // 3
    for (system, action), taken in rounds.taken.items():
        blocked, total, _ = zip(*taken[1:], strict=True)
        slowed = rounds.slowed.get((system, action))
        kind = next(kind for kind in plain if kind in action)
        moved = weights if kind == "export" else rounds.nbytes
        yield {
            "system": system,
            "action": action,
            "device": device.type,
            "transport": "disk",
            "bytes": moved,
            "blocked_us": as_microseconds(Timing.of(blocked)),
            "slows_step_us": as_microseconds(Timing.of(slowed[1:])) if slowed else None,
            "total_us": as_microseconds(Timing.of(total)),
            "bytes_per_second": moved / Timing.of(total).median,
            "of_plain": plain[kind] / Timing.of(total).median,
            "memory_bytes": max(rose for _, _, rose in taken),
            "step_us": as_microseconds(Timing.of(rounds.steps[1:])),
        }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = [row for row in rows if row["size"] == size]
        first = of_size[0]
        print(
            f"{size} parameters, {first['bytes'] / 1e6:,.0f} MB with AdamW; a step takes "
            f"{in_milliseconds(first['step_us'])} ms"
        )
        table = [
            [
                row["system"],
                row["action"],
                *(in_milliseconds(row[key]) for key in FIGURES),
                f"{row['bytes_per_second'] / 1e6:,.0f}",
                f"{row['of_plain']:.2f}",
                f"{row['memory_bytes'] / 1e6:,.0f}",
            ]
            for row in of_size
        ]
        times = ["blocked ms", "slows a step ms", "total ms"]
        print_table(["system", "call", *times, "MB/s", "of plain", "memory MB"], table)


def in_milliseconds(figures: dict[str, float] | None) -> str:
    """Return the median and the quartiles; nothing for what was not measured."""
    if figures is None:
        return ""
    median, low, high = (figures[key] / 1e3 for key in ("median", "low", "high"))
    shown = INDISTINCT if includes_zero(figures) else f"{median:,.0f}"
    return f"{shown} ({low:,.0f} to {high:,.0f})"
