"""Several ranks' ledgers on one clock, and who came last."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from fsdp_ext.agreement import exchange
from fsdp_ext.causes import Lateness
from fsdp_ext.ledger import WIRES, Iteration
from fsdp_ext.unit import Unit

_ROUNDS = 9


def collect(iterations: Sequence[Iteration], unit: Unit) -> dict[int, list[Iteration]]:
    """Return all ranks' iterations, in this rank's time; all ranks of ``unit``'s mesh call this.

    Only those that all ranks have.

    Raises:
        RuntimeError: if there are none.
    """
    # Of one boot of one machine, all processes have the same clock.
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else ""
    readings = _readings(unit.mesh.get_group())
    brought: list[tuple[str, list[float], list[Iteration]]]
    brought = exchange(unit, (host, readings, list(iterations)))
    common = set.intersection(*({one.number for one in of_rank} for *_, of_rank in brought))
    if not common:
        raise RuntimeError(
            "merge expects ranks that have recorded the same steps but they have none in common; "
            "profile the same steps on all of them"
        )
    my_host, my_clock = host, readings
    result = {}
    for rank, (its_host, its_clock, its_iterations) in enumerate(brought):
        offset = 0.0
        if not my_host or its_host != my_host:
            offset = statistics.median(a - b for a, b in zip(my_clock, its_clock, strict=True))
        result[rank] = [
            _moved(iteration, offset) for iteration in its_iterations if iteration.number in common
        ]
    return result


def _readings(group: dist.ProcessGroup) -> list[float]:
    """Return this rank's clock at moments that are about the same on all ranks."""
    readings = []
    for _ in range(_ROUNDS):
        dist.barrier(group)
        readings.append(time.monotonic())
    return readings


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
    ranks: Mapping[int, Sequence[Iteration]], rank: int
) -> dict[tuple[int, int], Lateness]:
    """Return by how much the slowest rank came after ``rank`` to each collective, and which it was.

    Ranks issue collectives in one order on each lane, so the k-th of one rank is the k-th of all.

    Returns:
        By iteration's number and the place among its spans; those that all ranks recorded alike.
    """
    result: dict[tuple[int, int], Lateness] = {}
    by_number = {
        other: {iteration.number: iteration for iteration in iterations}
        for other, iterations in ranks.items()
    }
    for number, iteration in by_number[rank].items():
        index = {id(span): place for place, span in enumerate(iteration.spans)}
        for work in WIRES:
            columns = {other: of[number].of(work) for other, of in by_number.items()}
            mine = columns[rank]
            if {len(column) for column in columns.values()} != {len(mine)}:
                continue
            for k, span in enumerate(mine):
                begins = {other: column[k].begin for other, column in columns.items()}
                slowest = max(begins, key=lambda other: begins[other])
                behind = min(begins[slowest], span.end) - span.begin
                spread = begins[slowest] - min(begins.values())
                result[number, index[id(span)]] = Lateness(max(behind, 0.0), slowest, spread)
    return result
