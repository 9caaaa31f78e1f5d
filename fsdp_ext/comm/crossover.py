"""From which size on collectives are composed of messages: Note [composed collectives].

A backend's own collective takes alpha + S / beta seconds, and so does a composed one, with another
alpha and beta. Both are measured on the link in use when ranks connect, and the lines cross at most
once. All ranks have to choose alike, so they fit the times of the slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext.comm.fit import Fit, Sample, fit

# If ranks differ, composed collectives raise at once and say in what; the backend's own do not. So
# these are chosen only if they are faster by this factor, which also outweighs a busy host's noise.
_PREFERENCE = 2.0
_REPEATS = 7
_WARM_UP = 2
# Bytes summed over all ranks. Larger gathers are always composed, since the backend's own send one
# large message at a time; so are reductions above the inline sizes.
_SMALL = 1 << 10
_LARGE = 1 << 22


def crossover(own: Fit, composed: Fit, largest: int) -> int:
    """Return the bytes from which composed collectives are faster, at most ``largest`` + 1.

    Args:
        own: the costs of the backend's own collective.
        composed: the costs of the composed one.
        largest: the largest collective that may be the backend's own, in bytes over all ranks.
    """
    latency = composed.alpha - own.alpha  # what composing costs
    rate = 1 / own.beta - 1 / composed.beta  # seconds that it saves for each byte
    if latency <= 0:  # faster at first, and then the backend may be faster from some size on
        return 0 if composed.predict(largest) <= own.predict(largest) else largest + 1
    return min(math.ceil(latency / rate), largest + 1) if rate > 0 else largest + 1


def choose_crossovers(lanes: _C.Lanes, group: dist.ProcessGroup) -> None:
    """Measure both ways on these lanes and set from which size on they compose collectives.

    Args:
        lanes: new lanes of a process group. All ranks make this call together.
        group: a private group of the same ranks.

    Raises:
        RuntimeError: if a collective fails.
    """
    if not lanes.can_compose:
        return
    if lanes.hosts:  # the backend's own would send messages between ranks that share memory
        lanes.compose_from(0, 0)
        return
    ranks = group.size()
    gathers = [_whole(nbytes, ranks) for nbytes in (_SMALL, lanes.inline_bytes * ranks, _LARGE)]
    whole = torch.zeros(max(gathers), dtype=torch.uint8).view(torch.float32)
    part = torch.zeros_like(whole)
    calls: dict[tuple[str, int], Callable[[], None]] = {}
    for nbytes in gathers:
        count = nbytes // 4
        calls["gather", nbytes] = partial(lanes.all_gather, part[: count // ranks], whole[:count])
    for nbytes in gathers[:2]:
        count = nbytes // 4
        calls["reduce", nbytes] = partial(
            lanes.reduce_scatter, whole[:count], part[: count // ranks]
        )
    own = _measure(lanes, group, calls, composed_from=None)
    composed = _measure(lanes, group, calls, composed_from=0)
    lanes.compose_from(
        choose(own, composed, "gather", _LARGE),
        choose(own, composed, "reduce", lanes.inline_bytes * ranks),
    )


def choose(own: list[Sample], composed: list[Sample], operation: str, largest: int) -> int:
    """Return from which size on to compose this operation: 0 unless the backend is preferred."""
    backend = [
        replace(sample, seconds=_PREFERENCE * sample.seconds)
        for sample in own
        if sample.operation == operation
    ]
    ours = [sample for sample in composed if sample.operation == operation]
    if all(b.seconds >= o.seconds for b, o in zip(backend, ours, strict=True)):
        return 0
    return crossover(_fit(backend), _fit(ours), largest)


def _whole(nbytes: int, ranks: int) -> int:
    """Return about `nbytes` bytes that all ranks can share evenly as fp32 numbers."""
    return max(1, nbytes // (4 * ranks)) * 4 * ranks


def _measure(
    lanes: _C.Lanes,
    group: dist.ProcessGroup,
    calls: dict[tuple[str, int], Callable[[], None]],
    composed_from: int | None,
) -> list[Sample]:
    """Return the time of each call: the shortest of several, on the slowest rank."""
    lanes.compose_from(composed_from, composed_from)
    seconds: list[list[float]] = []
    for call in calls.values():
        taken = []
        for _ in range(_WARM_UP + _REPEATS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        seconds.append(taken[_WARM_UP:])
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    shortest = slowest.min(dim=1).values.tolist()
    return [Sample(*key, found) for key, found in zip(calls, shortest, strict=True)]


def _fit(samples: list[Sample]) -> Fit:
    """Fit the samples. On a busy machine a larger message may seem faster."""
    longest = 0.0
    rising = []
    for sample in samples:  # in the order of their sizes
        longest = max(longest, sample.seconds)
        rising.append(replace(sample, seconds=longest))
    rising[-1] = replace(rising[-1], seconds=longest * (1 + 1e-6))
    return fit(rising)
