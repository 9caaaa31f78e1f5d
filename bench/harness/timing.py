"""How calls are timed: in turns, after a warm-up, on memory that is in no cache.

Machines are noisy. So systems take turns within one process, and a row has the median with the
quartiles. Compare ratios within one run, never times of two runs.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

BYTES_IN_ROTATION = 2**27  # all operands that take turns, together
MOST_IN_ROTATION = 20
INDISTINCT = "not distinguishable from zero"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and quartiles over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise at least two repeats."""
        # The quartiles lie between the smallest and the largest repeat, even of two.
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def as_microseconds(timing: Timing) -> dict[str, float]:
    """Return a timing's three figures in microseconds."""
    return {name: value * 1e6 for name, value in asdict(timing).items()}


def includes_zero(figures: Mapping[str, float]) -> bool:
    """Return whether zero is between the quartiles, so that a table should show no figure.

    Args:
        figures: as `as_microseconds` returns them.
    """
    return figures["low"] <= 0 <= figures["high"]


def operands_in_rotation(nbytes: int, least: int = 1) -> int:
    """Return how many operands have to take turns so that the next one is in no cache.

    Args:
        nbytes: bytes of one operand.
        least: the smallest number to return, for operands that are larger than the caches.
    """
    return max(least, min(MOST_IN_ROTATION, BYTES_IN_ROTATION // max(nbytes, 1)))


class Rotation:
    """The same call on several operands, which take turns."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._next = itertools.cycle(calls)

    def __call__(self) -> Any:
        """Call with the next operand."""
        return next(self._next)()


def time_in_turns(
    systems: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Time the calls in turns; return the seconds of each system's repeats.

    Args:
        systems: calls by name. The result of a call is freed outside the measured time.
        repeats: how often each is timed; at least 4.
        warmup: how often each is called before that.
    """
    for call in systems.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    order = random.Random(0)
    for _ in range(repeats):
        # The order is random: a call finds the caches and threads of the previous call.
        for name in order.sample(list(systems), len(systems)):
            start = time.perf_counter()
            result = systems[name]()
            seconds[name].append(time.perf_counter() - start)
            del result
    return seconds


def time_on_gpu(
    systems: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Do as `time_in_turns`, but measure the time on the current GPU's stream, by events.

    Args:
        systems: calls by name, which issue work to the current stream.
        repeats: how often each is timed; at least 4.
        warmup: how often each is called before that.
    """
    for call in systems.values():
        for _ in range(warmup):
            call()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in systems}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(systems), len(systems)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            systems[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) / 1e3 for start, end in pairs]
        for name, pairs in events.items()
    }
