"""Several ranks' ledgers on one clock, and who came last."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ext.profiler.causes import Lateness
from fsdp_ext.profiler.recording import WIRES, Iteration
from fsdp_ext.sharding.agreement import exchange, has_peers
from fsdp_ext.sharding.unit import Unit

_ROUNDS = 9

# How many collectives of each kind a rank recorded, by the iteration's number.
_Counts = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Clocks:
    """What makes ranks' iterations comparable.

    Args:
        common: numbers of the iterations that all ranks have.
        alike: of these, the ones of which all ranks recorded as many collectives of each kind.
        offsets: seconds to add to each rank's times for the first rank's.
        rank: this one.
    """

    common: frozenset[int]
    alike: frozenset[int]
    offsets: tuple[float, ...]
    rank: int


def compare_clocks(iterations: Sequence[Iteration], unit: Unit) -> Clocks:
    """Compare clocks, and what was recorded; all ranks of ``unit``'s mesh call this.

    Raises:
        RuntimeError: if they have no iteration in common.
    """
    # Of one boot of one machine, all processes have the same clock.
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else ""
    counts: _Counts = {one.number: tuple(len(one.of(work)) for work in WIRES) for one in iterations}
    said: list[tuple[str, list[float], _Counts]]
    said = exchange(unit, (host, _readings(unit), counts))
    common = frozenset.intersection(*(frozenset(of_rank) for *_, of_rank in said))
    if not common:
        raise RuntimeError(
            "merge expects ranks that have recorded the same steps but they have none in common; "
            "profile the same steps on all of them"
        )
    first_host, first_clock, first_counts = said[0]
    return Clocks(
        common=common,
        alike=frozenset(n for n in common if all(of[n] == first_counts[n] for *_, of in said)),
        offsets=tuple(
            0.0
            if host and host == first_host
            else statistics.median(a - b for a, b in zip(first_clock, clock, strict=True))
            for host, clock, _ in said
        ),
        rank=unit.mesh.get_local_rank(),
    )


def _readings(unit: Unit) -> list[float]:
    """Return this rank's clock at moments that are about the same on all ranks."""
    readings = []
    for _ in range(_ROUNDS):
        if has_peers(unit):
            dist.barrier(unit.mesh.get_group())
        readings.append(time.monotonic())
    return readings


def collect(
    iterations: Sequence[Iteration], clocks: Clocks, unit: Unit
) -> dict[int, list[Iteration]]:
    """Return all ranks' iterations, in this rank's time; all ranks of ``unit``'s mesh call this."""
    brought: list[list[Iteration]] = exchange(unit, list(iterations))
    mine = clocks.offsets[clocks.rank]
    return {
        rank: [_moved(iteration, clocks.offsets[rank] - mine) for iteration in of_rank]
        for rank, of_rank in enumerate(brought)
    }


def _moved(iteration: Iteration, offset: float) -> Iteration:
    if offset == 0.0:
        return iteration
    spans = tuple(
        replace(
            span,
            begin=span.begin + offset,
            end=span.end + offset,
            issued=span.issued + offset if span.issued else 0.0,
            refused=span.refused + offset if span.refused else 0.0,
            possible=span.possible + offset if span.possible else 0.0,
        )
        for span in iteration.spans
    )
    return Iteration(iteration.number, spans, iteration.end + offset)


def lateness(
    iterations: Sequence[Iteration], clocks: Clocks, unit: Unit
) -> dict[tuple[int, int], Lateness]:
    """Return by how much the slowest rank came after this one to each collective, and which it was.

    Ranks issue collectives in one order on each lane, so the k-th of one rank is the k-th of all.
    Three reductions of a number a collective tell; all ranks of ``unit``'s mesh call this.

    Returns:
        By iteration's number and the place among its spans; those that all ranks recorded alike.
    """
    offset = clocks.offsets[clocks.rank]
    found = [
        (iteration.number, place, span)
        for iteration in iterations
        if iteration.number in clocks.alike
        for work in WIRES
        for place, span in enumerate(iteration.spans)
        if span.work == work
    ]
    begins = torch.tensor([span.begin + offset for *_, span in found], dtype=torch.float64)
    first, last = (
        _over_ranks(begins, dist.ReduceOp.MIN, unit),
        _over_ranks(begins, dist.ReduceOp.MAX, unit),
    )
    ranks = torch.where(begins == last, clocks.rank, len(clocks.offsets))
    slowest = _over_ranks(ranks, dist.ReduceOp.MIN, unit)
    spreads = (last - first).tolist()
    return {
        (number, place): Lateness(max(min(end - offset, span.end) - span.begin, 0.0), rank, spread)
        for (number, place, span), end, rank, spread in zip(
            found, last.tolist(), slowest.tolist(), spreads, strict=True
        )
    }


def _over_ranks(values: Tensor, op: dist.ReduceOp.RedOpType, unit: Unit) -> Tensor:
    if not has_peers(unit):
        return values
    reduced = values.to(unit.device, copy=True)
    dist.all_reduce(reduced, op=op, group=unit.mesh.get_group())
    return reduced.cpu()
