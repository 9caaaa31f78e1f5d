"""Trains many cases on a GPU in one process for each rank, since a process takes seconds to start.

The ranks share the GPU, and a case that fails does not end the others.
"""

from __future__ import annotations

import functools
import gc
import os
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp_ext.sharding.param_group
from support.launcher import run_ranks
from support.parity import Case, compare_on_rank

DIRECT, PACKED = 0, 1 << 62  # parameters at least this large are gathered directly


def train_cases(
    cases: Sequence[Case], world_size: int, direct_bytes: int, directory: Path, timeout: float
) -> list[str]:
    """Compare the cases with FSDP2 and the unsharded model, and return NCCL's log of each rank.

    Args:
        cases: those to train, each with a fact of its own.
        world_size: number of ranks.
        direct_bytes: parameters at least this large are gathered directly.
        directory: an empty folder for the outcomes of each rank. They are printed at the end, even
            if the call fails or is late.
        timeout: seconds for all cases together.
    """
    try:
        answers = run_ranks(
            _compare,
            world_size,
            cases,
            direct_bytes,
            str(directory),
            timeout=timeout,
            device="cuda",
        )
    finally:
        for path in sorted(directory.iterdir()):
            print(f"{path.name} of {world_size}:\n{path.read_text()}")
    failures = {
        f"rank {r}: {name}": text
        for r, (failed, _) in enumerate(answers)
        for name, text in failed.items()
    }
    assert not failures, "\n\n".join(f"{name}\n{text}" for name, text in failures.items())
    return [log for _, log in answers]


def _compare(
    cases: Sequence[Case], direct_bytes: int, directory: str
) -> tuple[dict[str, str], str]:
    """Return the failures by case, and NCCL's log. A file in the directory has the outcomes."""
    torch.backends.cudnn.deterministic = True
    fsdp_ext.sharding.param_group.DIRECT_BYTES = direct_bytes
    # If a case fails on one rank alone, its peer hangs in the case. Then this group's timeout ends
    # the call early.
    together = dist.new_group(backend="gloo", timeout=timedelta(seconds=15))
    failures = {}
    with (Path(directory) / f"rank{dist.get_rank()}").open("w") as outcomes:
        say = functools.partial(print, file=outcomes, flush=True)  # a rank that is late is killed
        for case in cases:
            say(f"{case.fact}, {case.steps} steps ... ", end="")
            start = time.monotonic()
            try:
                compare_on_rank(case, "fsdp_ext")
                outcome = "ok"
            except Exception:
                outcome = failures[case.fact] = traceback.format_exc()
            say(f"{time.monotonic() - start:.1f} s, {outcome}")
            gc.collect()
            dist.barrier(together)
    log = os.environ.get("NCCL_DEBUG_FILE")
    return failures, Path(log).read_text(errors="replace") if log is not None else ""
