"""Trains many cases on a GPU in one process for each rank, since a process takes seconds to start.

The ranks share the GPU, and a case that fails does not end the others.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ext.sharding.params.param_group
from support.launcher import run_ranks
from support.on_device import MakesTensorsOn
from support.parity import Case, compare_on_rank, device

DIRECT, PACKED = 0, 1 << 62  # parameters at least this large are gathered directly


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def losses_of(model: nn.Module, width: int, steps: int) -> list[Tensor]:
    """Train by SGD and return the losses. The host waits for no step, which would order streams."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x.pin_memory().cuda(non_blocking=True)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@dataclasses.dataclass(frozen=True)
class Work:
    """A worker of another test, which makes its tensors on the GPU.

    Attributes:
        fact: the fact that holds if it does not raise.
        worker: a function that pickle finds by name.
        args: the worker's arguments.
    """

    fact: str
    worker: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def __call__(self) -> None:
        before = _allocations()
        with MakesTensorsOn(device()):
            self.worker(*self.args)
        assert _allocations() > before, f"{self.fact}: no tensor was on the GPU"


@dataclasses.dataclass(frozen=True)
class _Comparison:
    case: Case

    @property
    def fact(self) -> str:
        return f"{self.case.fact}, {self.case.steps} steps"

    def __call__(self) -> None:
        compare_on_rank(self.case, "fsdp_ext")


def train_cases(
    cases: Sequence[Case], world_size: int, direct_bytes: int, directory: Path, timeout: float
) -> list[str]:
    """Compare the cases with FSDP2 and the unsharded model, and return NCCL's log of each rank.

    Args:
        cases: the cases to train, each with a fact of its own.
        world_size: number of ranks.
        direct_bytes: parameters at least this large are gathered directly.
        directory: an empty folder for the outcomes of each rank. They are printed at the end, even
            if the call fails or is late.
        timeout: seconds for all cases together.
    """
    comparisons = [_Comparison(case) for case in cases]
    return _run_all(comparisons, world_size, direct_bytes, directory, timeout)


def run_works(works: Sequence[Work], world_size: int, directory: Path, timeout: float) -> None:
    """Run workers one after another on the same ranks. The arguments are those of train_cases."""
    _run_all(works, world_size, DIRECT, directory, timeout)


def _run_all(
    works: Sequence[Work | _Comparison],
    world_size: int,
    direct_bytes: int,
    directory: Path,
    timeout: float,
) -> list[str]:
    try:
        answers = run_ranks(
            _run_on_rank,
            world_size,
            works,
            direct_bytes,
            str(directory),
            timeout=timeout,
            device="cuda",
        )
    finally:
        for path in sorted(directory.glob("rank*")):
            print(f"{path.name} of {world_size}:\n{path.read_text()}")
    failures = {
        f"rank {r}: {name}": text
        for r, (failed, _) in enumerate(answers)
        for name, text in failed.items()
    }
    assert not failures, "\n\n".join(f"{name}\n{text}" for name, text in failures.items())
    return [log for _, log in answers]


def _run_on_rank(
    works: Sequence[Work | _Comparison], direct_bytes: int, directory: str
) -> tuple[dict[str, str], str]:
    """Return the failures by fact, and NCCL's log. A file in the directory has the outcomes."""
    torch.backends.cudnn.deterministic = True
    fsdp_ext.sharding.params.param_group.DIRECT_BYTES = direct_bytes
    # If a case fails on one rank alone, its peer hangs in the case. Then this group's timeout ends
    # the call early.
    together = dist.new_group(backend="gloo", timeout=timedelta(seconds=15))
    failures = {}
    with (Path(directory) / f"rank{dist.get_rank()}").open("w") as outcomes:
        say = functools.partial(print, file=outcomes, flush=True)  # a rank that is late is killed
        for work in works:
            say(f"{work.fact} ... ", end="")
            start = time.monotonic()
            try:
                work()
                outcome = "ok"
            except Exception:
                outcome = failures[work.fact] = traceback.format_exc()
            say(f"{time.monotonic() - start:.1f} s, {outcome}")
            gc.collect()
            dist.barrier(together)
    log = os.environ.get("NCCL_DEBUG_FILE")
    return failures, Path(log).read_text(errors="replace") if log is not None else ""
