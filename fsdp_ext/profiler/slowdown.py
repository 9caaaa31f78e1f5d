"""An estimate of how much communication slows down the compute beside it."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fsdp_ext.profiler.recording import (
    COLLECTIVES,
    Iteration,
    merged_intervals,
    overlap,
    own_compute,
)

# A unit computed alone if the wire was busy for at most the first share of its time, and beside
# communication if it was busy for at least the second share.
ALONE, BESIDE = 0.2, 0.6


@dataclass(frozen=True)
class Slowdown:
    """How much longer units compute beside communication than alone."""

    factor: float  # ratio of the two times, over all units that could be compared
    seconds: float  # roughly what that costs each step
    compared: int  # how many kinds of units were seen both ways


def slowdown(iterations: Sequence[Iteration], kinds: Sequence[Hashable]) -> Slowdown | None:
    """Compare units of one kind that computed beside communication with those that computed alone.

    Args:
        iterations: the steps of one rank.
        kinds: a key for each unit, by its number. Units with equal keys are assumed to be alike.

    Returns:
        None if no kind of unit was seen both ways. The estimate needs two or more units of one kind
        that compute while the wire is idle.
    """
    alone: defaultdict[tuple[str, Hashable], dict[int, list[float]]] = defaultdict(dict)
    beside: defaultdict[tuple[str, Hashable], list[float]] = defaultdict(list)
    for iteration in iterations:
        wires = merged_intervals(
            sorted(iteration.of(*COLLECTIVES), key=lambda span: span.begin), 0.0
        )
        for span, own in own_compute(iteration):
            if span.seconds <= 0 or own < 0.5 * span.seconds:
                continue  # mostly other units inside it, which are compared themselves
            key = (span.work, kinds[span.first])
            share = overlap(span.begin, span.end, wires) / span.seconds
            if share < ALONE:
                alone[key].setdefault(span.first, []).append(own)
            elif share > BESIDE:
                beside[key].append(own)
    # A single unit may differ from the others by more than communication slows them down.
    both = [key for key in alone if key in beside and len(alone[key]) > 1]
    if not both:
        return None
    # Medians ignore the rare moments in which other work ran on the machine.
    alone_seconds = {key: statistics.median(itertools.chain(*alone[key].values())) for key in both}
    expected = sum(alone_seconds[key] * len(beside[key]) for key in both)
    taken = sum(statistics.median(beside[key]) * len(beside[key]) for key in both)
    return Slowdown(taken / expected, (taken - expected) / len(iterations), len(both))
