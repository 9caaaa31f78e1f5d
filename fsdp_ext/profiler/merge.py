"""Iterations of several ranks on one clock, and the straggler of each collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ext.comm.rendezvous import machine
from fsdp_ext.profiler.causes import Lateness
from fsdp_ext.profiler.recording import COLLECTIVES, Iteration
from fsdp_ext.sharding.root.agreement import exchange, has_peers
from fsdp_ext.sharding.root.unit import Unit

# How often ranks read their clocks at a barrier; the median difference counts.
_ROUNDS = 9

# The number of collectives of each kind that a rank recorded, by iteration number.
_Counts = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Clocks:
    """How iterations of different ranks compare."""

    common: frozenset[int]  # numbers of the iterations that all ranks recorded
    # The common ones in which all ranks recorded equally many collectives of each kind.
    alike: frozenset[int]
    # For each rank, the seconds to add to its times to get times of rank 0's clock.
    offsets: tuple[float, ...]


def compare_clocks(iterations: Sequence[Iteration], unit: Unit) -> Clocks:
    """Compare the ranks' clocks and iterations. All ranks of ``unit``'s mesh call this."""
    host = machine()  # all processes of one boot of one machine share a clock
    counts: _Counts = {
        one.number: tuple(len(one.of(work)) for work in COLLECTIVES) for one in iterations
    }
    answers: list[tuple[str, list[float], _Counts]]
    answers = exchange(unit, (host, _readings(unit), counts))
    common = frozenset.intersection(*(frozenset(of_rank) for *_, of_rank in answers))
    if not common:
        raise RuntimeError(
            "merge found no step that all ranks recorded. Profile the same steps on all ranks."
        )
    first_host, first_clock, first_counts = answers[0]
    return Clocks(
        common=common,
        alike=frozenset(
            n for n in common if all(counts[n] == first_counts[n] for *_, counts in answers)
        ),
        offsets=tuple(
            0.0
            if host and host == first_host
            else statistics.median(a - b for a, b in zip(first_clock, clock, strict=True))
            for host, clock, _ in answers
        ),
    )


def _readings(unit: Unit) -> list[float]:
    """Return this rank's clock after each of several barriers, which end everywhere at once."""
    readings = []
    for _ in range(_ROUNDS):
        if has_peers(unit):
            for group in unit.ranks.groups:
                dist.barrier(group)
        readings.append(time.monotonic())
    return readings


def collect(
    iterations: Sequence[Iteration], clocks: Clocks, unit: Unit
) -> dict[int, list[Iteration]]:
    """Return all ranks' iterations on this rank's clock. All ranks of ``unit``'s mesh call this."""
    gathered: list[list[Iteration]] = exchange(unit, list(iterations))
    mine = clocks.offsets[unit.ranks.rank_in_mesh]
    return {
        rank: [_moved(iteration, clocks.offsets[rank] - mine) for iteration in of_rank]
        for rank, of_rank in enumerate(gathered)
    }


def _moved(iteration: Iteration, offset: float) -> Iteration:
    if offset == 0.0:
        return iteration
    times = ("begin", "end", "issued", "refused", "possible")
    spans = []
    for span in iteration.spans:
        given = {name: getattr(span, name) for name in times}
        moved = {name: time + offset for name, time in given.items() if time}  # 0 stands for none
        spans.append(replace(span, **moved))
    return Iteration(iteration.number, tuple(spans), iteration.end + offset)


def lateness(
    iterations: Sequence[Iteration], clocks: Clocks, unit: Unit
) -> dict[tuple[int, int], Lateness]:
    """Return the straggler of each collective, and how much later than this rank it began.

    All ranks of ``unit``'s mesh call this. Ranks issue the collectives of each lane in one order,
    so the k-th collective of one rank is the k-th of all. Three all-reduces of one number per
    collective suffice, for each group of ranks. Gathers of smaller groups are left out.

    Returns:
        The lateness by iteration number and index among its spans, for the iterations in which all
        ranks recorded the same collectives.
    """
    found = _lateness(iterations, ("gather", "reduce"), clocks, unit, unit.ranks.shard_group)
    if unit.ranks.replicate_group is not None:
        between = unit.ranks.replicate_group
        found |= _lateness(iterations, ("all-reduce",), clocks, unit, between)
    return found


def _lateness(
    iterations: Sequence[Iteration],
    works: Sequence[str],
    clocks: Clocks,
    unit: Unit,
    group: dist.ProcessGroup,
) -> dict[tuple[int, int], Lateness]:
    """Return the stragglers of the collectives of one group of ranks."""
    this_rank = unit.ranks.rank_in_mesh
    offset = clocks.offsets[this_rank]
    found = [
        (iteration.number, index, span)
        for iteration in iterations
        if iteration.number in clocks.alike
        for work in works
        for index, span in enumerate(iteration.spans)
        if span.work == work
    ]

    def over_ranks(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if not has_peers(unit):
            return values
        reduced = values.to(unit.device, copy=True)
        dist.all_reduce(reduced, op=op, group=group)
        return reduced.cpu()

    begins = torch.tensor([span.begin + offset for *_, span in found], dtype=torch.float64)
    first = over_ranks(begins, dist.ReduceOp.MIN)
    last = over_ranks(begins, dist.ReduceOp.MAX)
    ranks = torch.where(begins == last, this_rank, len(clocks.offsets))
    slowest = over_ranks(ranks, dist.ReduceOp.MIN)
    spreads = (last - first).tolist()
    return {
        (number, index): Lateness(max(min(end - offset, span.end) - span.begin, 0.0), rank, spread)
        for (number, index, span), end, rank, spread in zip(
            found, last.tolist(), slowest.tolist(), spreads, strict=True
        )
    }
