"""The figures of a profile: the average step, and the cost of each bucket or unit."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_ext.profiler.causes import PAUSE, Cause
from fsdp_ext.profiler.recording import (
    COLLECTIVES,
    OPTIMIZER,
    WAITS,
    Span,
    merged_intervals,
    overlap,
)
from fsdp_ext.profiler.result import Recording

# A smaller factor between compute beside communication and compute alone is noise.
_SLOWED = 1.05
_OPERATIONS = (*COLLECTIVES, "optimizer")
_PHASES = ("forward", "backward", "other")


@dataclass(frozen=True)
class _Key:
    """The subject of a row: the collectives or the updates of one bucket in one phase.

    ``units`` are the numbers of the bucket's first and last unit.
    """

    units: tuple[int, int]
    operation: str
    phase: str

    @classmethod
    def of(cls, span: Span) -> _Key:
        return cls(span.units, "optimizer" if span.work in OPTIMIZER else span.work, span.phase)


@dataclass(frozen=True)
class Row:
    """The cost of one bucket's or unit's collectives or updates, averaged over the steps.

    Args:
        units: names of the first and the last unit, or of the only one.
        operation: "gather", "reduce", "group gather" of units with ``reshard_after_forward=k``,
            over replicas "all-reduce", or "optimizer": the bucket's updates by an attached
            optimizer, or ``step()`` of all units after backward.
        phase: the phase that issued it: "forward", "backward" or "other".
        collectives: number of collectives that carry it, or of updates.
        nbytes: bytes on the wire, summed over the ranks that shard the model; of an all-reduce,
            those of one rank.
        wire: seconds of the collectives, or of the updates.
        hidden: those seconds in which the compute stream did not wait.
        exposed: seconds that the compute stream waited for it, whatever delayed it; of the
            optimizer also those in which that stream ran it.
        causes: seconds of ``exposed`` by cause.
        slowest: the worst straggler, by its seconds summed over the collectives. None unless ranks
            were merged.
    """

    units: str
    operation: str
    phase: str
    collectives: float
    nbytes: float
    wire: float
    hidden: float
    exposed: float
    causes: dict[str, float]
    slowest: int | None = None


@dataclass(frozen=True)
class Summary:
    """The average step in seconds: step = compute + exposed + optimizer + other.

    Args:
        iterations: how many steps were measured.
        step: from the begin of one forward to the begin of the next.
        fastest: the shortest step.
        slowest: the longest step.
        compute: forward and backward without waits and the optimizer.
        exposed: waits for communication and, on a GPU, for updates of an attached optimizer.
        optimizer: the optimizer on the compute stream: ``step()`` and, on the host, updates of an
            attached optimizer.
        other: everything else: the loss, the input pipeline.
        wire: time of all collectives, summed.
        hidden: the hidden share of ``wire``, 0 to 1, summed over the rows.
        causes: seconds of ``exposed`` by cause.
        slowed: estimated seconds that communication added to ``compute`` (``profile.slowdown``); 0
            if that is unknown or within the noise.
    """

    iterations: int
    step: float
    fastest: float
    slowest: float
    compute: float
    exposed: float
    optimizer: float
    other: float
    wire: float
    hidden: float
    causes: dict[str, float]
    slowed: float


def summarise(recording: Recording) -> Summary:
    """Return the average step. Its parts add up to the whole."""
    iterations = recording.iterations
    count = len(iterations)
    means = {
        name: statistics.fmean(getattr(one, name) for one in iterations)
        for name in ("step", "compute", "exposed", "optimizer", "other", "wire")
    }
    slow = recording.slowdown()
    causes: defaultdict[str, float] = defaultdict(float)
    for exposure in itertools.chain(*recording.exposures):
        causes[exposure.cause.value] += exposure.seconds / count
    steps = [iteration.step for iteration in iterations]
    rows = [row for row in rows_of(recording, "bucket") if row.operation in COLLECTIVES]
    return Summary(
        iterations=count,
        **means,
        fastest=min(steps),
        slowest=max(steps),
        hidden=sum(row.hidden for row in rows) / means["wire"] if means["wire"] > 0 else 1.0,
        causes=dict(sorted(causes.items(), key=lambda item: -item[1])),
        slowed=slow.seconds if slow is not None and slow.factor > _SLOWED else 0.0,
    )


# - Rows


@dataclass
class _Cost:
    """The cost of one row, per step."""

    collectives: float = 0.0
    nbytes: float = 0.0
    wire: float = 0.0
    hidden: float = 0.0
    causes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    behind: Counter[int] = field(default_factory=Counter)  # microseconds of stragglers, by rank


def rows_of(recording: Recording, by: str) -> list[Row]:
    """Return the cost of communication and updates, by unit: see ``profile.rows``."""
    if by not in ("bucket", "unit"):
        raise ValueError(
            f'profile got rows by {by!r}. Pass by="bucket", a row for what travels together, or '
            'by="unit".'
        )
    rows = []
    for key, cost in _costs(recording).items():
        shares = _shares(recording, key.units) if by == "unit" else [(key.units, 1.0)]
        rows += [(part, _row(recording.name_of(part), key, cost, share)) for part, share in shares]
    rows.sort(
        key=lambda one: (one[0], _OPERATIONS.index(one[1].operation), _PHASES.index(one[1].phase))
    )
    return [row for _, row in rows]


def _costs(recording: Recording) -> dict[_Key, _Cost]:
    count = len(recording.iterations)
    costs: defaultdict[_Key, _Cost] = defaultdict(_Cost)
    for iteration in recording.iterations:
        waits = merged_intervals(sorted(iteration.of(*WAITS), key=lambda span: span.begin), 0.0)
        for index, span in enumerate(iteration.spans):
            if span.work not in (*COLLECTIVES, *OPTIMIZER):
                continue
            cost = costs[_Key.of(span)]
            cost.collectives += 1 / count
            cost.nbytes += span.nbytes / count
            cost.wire += span.seconds / count
            if span.work == "step":  # no wait: the compute stream runs it
                cost.causes[Cause.OPTIMIZER.value] += span.seconds / count
            else:
                waited = overlap(span.begin, span.end, waits)
                cost.hidden += (span.seconds - waited) / count
            late = recording.late.get((iteration.number, index))
            if late is not None and late.spread > PAUSE:
                cost.behind[late.rank] += round(late.spread * 1e6)
    for exposure in itertools.chain(*recording.exposures):
        key = _Key(exposure.units, exposure.operation, exposure.phase)
        costs[key].causes[exposure.cause.value] += exposure.seconds / count
    return costs


def _shares(
    recording: Recording, units: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield each unit of a bucket with its share of the bucket's bytes."""
    members = recording.buckets.get(units, [units[0]])  # of all units, (-1, -1), it is -1
    total = sum(recording.sizes[number] for number in members)
    for number in members:
        yield (number, number), recording.sizes[number] / total if total else 1 / len(members)


def _row(name: str, key: _Key, cost: _Cost, share: float) -> Row:
    causes = {name: seconds * share for name, seconds in cost.causes.items()}
    return Row(
        units=name,
        operation=key.operation,
        phase=key.phase,
        collectives=cost.collectives,
        nbytes=cost.nbytes * share,
        wire=cost.wire * share,
        hidden=cost.hidden * share,
        exposed=sum(causes.values()),
        causes=causes,
        slowest=cost.behind.most_common(1)[0][0] if cost.behind else None,
    )
