"""What benchmarks share: interleaved timing, medians with their spread, a table, JSON.

Machines are noisy, so systems take turns within one process and what is reported is the median
with the interquartile range; compare ratios of one run, never times of two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and interquartile range over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise at least four repeats."""
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(median, low, high)


def time_in_turns(
    systems: Mapping[str, Callable[[], Any]],
    repeats: int,
    warmup: int = 5,
    after: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Time each system's call, all of them in turns; return the seconds of each repeat.

    Args:
        systems: calls by name. What a call returns is dropped outside the measured time.
        after: called with a system's name after each of its calls, outside the measured time.
        repeats: how often each is timed; at least 4.
        warmup: how often each is called before.
    """
    for name, call in systems.items():
        for _ in range(warmup):
            call()
            after(name)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    order = random.Random(0)
    for _ in range(repeats):
        # What came before leaves caches and threads warm, or cold, so no order is kept.
        for name in order.sample(list(systems), len(systems)):
            start = time.perf_counter()
            result = systems[name]()
            seconds[name].append(time.perf_counter() - start)
            del result
            after(name)
    return seconds


def time_on_gpu(
    systems: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 5
) -> dict[str, list[float]]:
    """As `time_in_turns`, but the seconds are those of the current GPU's stream, by its events.

    Args:
        systems: calls by name, which issue work to the current stream.
        repeats: how often each is timed; at least 4.
        warmup: how often each is called before.
    """
    for call in systems.values():
        for _ in range(warmup):
            call()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, call in systems.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) / 1e3 for start, end in pairs]
        for name, pairs in events.items()
    }


def arguments(description: str, quick: str) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes.

    Args:
        description: the benchmark's docstring; its first line is shown.
        quick: what --quick makes of it.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    return parser


def bind_to_core() -> None:
    """Keep this rank of torchrun's, all its threads, on a core of its own, as mpirun does.

    Else figures depend on which ranks' threads the kernel happens to put on one core. Where there
    are fewer cores than ranks, nothing is bound.
    """
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= len(cores):
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})


def leave_ranks() -> None:
    """End this rank of torchrun's, when all have come here.

    Not through Python's end: where a model still holds a process group, a thread of gloo's that
    asks for the GIL meanwhile aborts the process (seen with torch 2.13).
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def environment() -> dict[str, str]:
    """Return what a figure depends on besides the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned, the first to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def write_json(path: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a benchmark's rows with its environment, whole or not at all."""
    document = {"benchmark": name, "environment": environment(), "rows": list(rows)}
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)


def as_microseconds(timing: Timing) -> dict[str, float]:
    """Return a timing's three figures in microseconds."""
    return {name: value * 1e6 for name, value in asdict(timing).items()}
