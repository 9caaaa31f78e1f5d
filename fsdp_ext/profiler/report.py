"""What a profile says: a row a bucket or a unit, the whole step, text and JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_ext._util.tables import columns
from fsdp_ext.profiler.causes import MEANING, PAUSE, REMEDY, Cause
from fsdp_ext.profiler.recording import WIRES

if TYPE_CHECKING:
    from fsdp_ext.profiler.api import profile

# Compute that is slower beside communication counts from this factor on; less is noise.
_SLOWED = 1.05
# Causes of so much of what is exposed are explained.
_WORTH_A_LINE = 0.01
_MS = 1e3
_PHASES = ("forward", "backward", "other")

# A bucket by its first and last unit, an operation, a phase: what a row is of.
_Key = tuple[tuple[int, int], str, str]
_EVERY_UNIT = (-1, -1)


@dataclass(frozen=True)
class Row:
    """What one bucket's or unit's collectives cost, on average over the steps.

    Args:
        units: names of the first and the last unit, or of the only one.
        operation: "gather" or "reduce".
        phase: in which it was issued: "forward", "backward" or "other".
        collectives: how many a step that it has a part in.
        nbytes: on the wire, of all ranks together.
        wire: seconds on the wire.
        hidden: of these, beside compute.
        exposed: seconds that the compute stream waited for it, also for what kept it waiting.
        causes: seconds of ``exposed`` by cause.
        slowest: the rank that was last by the most seconds, where ranks were merged; else None.
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
    """A step on average, in seconds: step = compute + exposed + other.

    Args:
        iterations: how many steps were measured.
        step: from one forward's begin to the next one's.
        fastest: the shortest step.
        slowest: the longest one.
        compute: forward and backward without waits.
        exposed: waits for communication.
        other: what is neither: the loss, the optimizer, input.
        wire: time of all collectives.
        hidden: part of it, 0 to 1, that is hidden: what rows say that is, together.
        causes: seconds of ``exposed`` by cause.
        slowed: seconds of ``compute`` that it took longer beside communication, as far as that can
            be told: an estimate (``profile.slowdown``).
    """

    iterations: int
    step: float
    fastest: float
    slowest: float
    compute: float
    exposed: float
    other: float
    wire: float
    hidden: float
    causes: dict[str, float]
    slowed: float


def summarise(prof: profile) -> Summary:
    """Return the average step of a profile; its parts add up to it."""
    iterations = prof.iterations
    count = len(iterations)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    slow = prof.slowdown()
    costs = _costs(prof).values()
    causes: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        for name, seconds in cost.causes.items():
            causes[name] += seconds
    steps = [iteration.step for iteration in iterations]
    hidden = sum(_hidden(cost.wire, sum(cost.causes.values())) for cost in costs)
    wire = mean([iteration.wire for iteration in iterations])
    exposed = mean([iteration.exposed for iteration in iterations])
    return Summary(
        iterations=count,
        step=mean(steps),
        fastest=min(steps),
        slowest=max(steps),
        compute=mean([iteration.compute for iteration in iterations]),
        exposed=exposed,
        other=mean([iteration.other for iteration in iterations]),
        wire=wire,
        hidden=hidden / wire if wire > 0 else 1.0,
        causes=dict(sorted(causes.items(), key=lambda item: -item[1])),
        slowed=slow.seconds if slow is not None and slow.factor > _SLOWED else 0.0,
    )


# - Rows


@dataclass
class _Cost:
    """Of one row, a step."""

    collectives: float = 0.0
    nbytes: float = 0.0
    wire: float = 0.0
    causes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def rows_of(prof: profile, by: str) -> list[Row]:
    """Return what communication cost: ``profile.rows``."""
    if by not in ("bucket", "unit"):
        raise ValueError(
            f"profile expects rows by 'bucket' or 'unit' but got {by!r}; those of a bucket are "
            "gathered and reduced together"
        )
    costs = _costs(prof)
    slowest = _slowest(prof)
    found = [
        (part, key, share)
        for key in costs
        for part, share in (_units(prof, key[0]) if by == "unit" else [(key[0], 1.0)])
    ]
    found.sort(key=lambda one: (one[0], one[1][1], _PHASES.index(one[1][2])))
    return [_row(prof, part, key, costs[key], share, slowest) for part, key, share in found]


def _costs(prof: profile) -> dict[_Key, _Cost]:
    count = len(prof.iterations)
    costs: defaultdict[_Key, _Cost] = defaultdict(_Cost)
    for iteration in prof.iterations:
        for span in iteration.of(*WIRES):
            cost = costs[span.units, span.work, span.phase]
            cost.collectives += 1 / count
            cost.nbytes += span.nbytes / count
            cost.wire += span.seconds / count
    for exposures in prof.explain():
        for exposure in exposures:
            causes = costs[exposure.units, exposure.operation, exposure.phase].causes
            causes[exposure.cause.value] += exposure.seconds / count
    return costs


def _units(prof: profile, units: tuple[int, int]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield a bucket's units and their shares of it."""
    if units == _EVERY_UNIT:
        yield units, 1.0
        return
    members = prof.members(units)
    total = sum(prof.sizes[number] for number in members)
    for number in members:
        yield (number, number), prof.sizes[number] / total if total else 1 / len(members)


def _row(
    prof: profile,
    units: tuple[int, int],
    key: _Key,
    cost: _Cost,
    share: float,
    slowest: dict[_Key, int],
) -> Row:
    causes = {name: seconds * share for name, seconds in cost.causes.items()}
    exposed = sum(causes.values())
    wire = cost.wire * share
    return Row(
        units=prof.name_of(units),
        operation=key[1],
        phase=key[2],
        collectives=cost.collectives,
        nbytes=cost.nbytes * share,
        wire=wire,
        hidden=_hidden(wire, exposed),
        exposed=exposed,
        causes=causes,
        slowest=slowest.get(key),
    )


def _hidden(wire: float, exposed: float) -> float:
    """Return the seconds of a wire that no wait shows, which may be longer than the wire."""
    return max(0.0, wire - exposed)


def _slowest(prof: profile) -> dict[_Key, int]:
    """Return which rank was last by the most seconds, of those that came noticeably late."""
    behind: defaultdict[_Key, Counter[int]] = defaultdict(Counter)
    for iteration in prof.iterations:
        for place, span in enumerate(iteration.spans):
            found = prof.late.get((iteration.number, place))
            if found is not None and found.spread > PAUSE:
                microseconds = round(found.spread * 1e6)
                behind[span.units, span.work, span.phase][found.rank] += microseconds
    return {key: of.most_common(1)[0][0] for key, of in behind.items()}


# - Output


def text_of(prof: profile, by: str) -> str:
    """Return a report: ``profile.report``."""
    summary = summarise(prof)
    link = "a simulated link" if prof.transport == "simulated" else prof.transport
    rows = [_cells(row) for row in rows_of(prof, by)]
    on_wire = (
        f"wire {_ms(summary.wire)} ms, {summary.hidden:.0%} of it hidden"
        if summary.wire
        else "nothing was on a wire"
    )
    lines = [
        f"{summary.iterations} steps on rank {prof.rank} of {prof.world_size} over {link}, on "
        "average",
        "",
        *columns(_HEADER, rows, left=(0, 1, 2, len(_HEADER) - 1)),
        "",
        f"step {_ms(summary.step)} ms ({_ms(summary.fastest)} to {_ms(summary.slowest)}) = "
        f"compute {_ms(summary.compute)} + exposed {_ms(summary.exposed)} + other "
        f"{_ms(summary.other)}; {on_wire}",
    ]
    if prof.lost:
        lines.append(f"{prof.lost} older steps were not kept (iterations={prof.kept})")
    for name, seconds in summary.causes.items():
        cause = Cause(name)
        share = seconds / summary.exposed if summary.exposed else 0.0
        if share < _WORTH_A_LINE:
            continue
        lines.append(f"{_ms(seconds)} ms ({share:.0%}) {name}: {MEANING[cause]}")
        lines.append(f"    {REMEDY[cause]}")
    if summary.slowed:
        share = summary.slowed / summary.compute
        text = f"{Cause.SLOWED.value}: {MEANING[Cause.SLOWED]}"
        lines.append(f"{_ms(summary.slowed)} ms ({share:.0%} of compute) {text}")
        lines.append(f"    {REMEDY[Cause.SLOWED]}")
    return "\n".join(lines)


def document_of(prof: profile) -> dict[str, Any]:
    """Return all figures and spans: ``profile.to_json``.

    "slowest" says of this rank's collectives, by the step's number and the place among its spans,
    which rank came last, where ranks were merged.
    """
    slow = prof.slowdown()
    return {
        "transport": prof.transport,
        "world_size": prof.world_size,
        "rank": prof.rank,
        "summary": asdict(summarise(prof)),
        "rows": [asdict(row) for row in rows_of(prof, "bucket")],
        "rows_by_unit": [asdict(row) for row in rows_of(prof, "unit")],
        "compute_slowed_by_communication": None if slow is None else asdict(slow),
        "iterations_lost": prof.lost,
        "units": prof.names,
        "ranks": {
            str(rank): [
                {
                    "number": iteration.number,
                    "begin": iteration.begin,
                    "end": iteration.end,
                    "spans": [asdict(span) for span in iteration.spans],
                }
                for iteration in iterations
            ]
            for rank, iterations in prof.ranks.items()
        },
        "slowest": [
            {"number": number, "span": place, **asdict(late)}
            for (number, place), late in sorted(prof.late.items())
        ],
    }


_HEADER = (
    "units",
    "operation",
    "phase",
    "wire MB",
    "wire ms",
    "hidden ms",
    "exposed ms",
    "because",
)


def _cells(row: Row) -> tuple[str, ...]:
    causes = sorted(row.causes.items(), key=lambda item: -item[1])
    because = ", ".join(
        name if seconds > 0.9 * row.exposed else f"{name} {_ms(seconds)}"
        for name, seconds in causes
        if seconds > 0.05 * row.exposed and seconds >= 5e-6
    )
    if row.slowest is not None:
        because += f"{'; ' if because else ''}rank {row.slowest} comes last"
    return (
        row.units,
        row.operation,
        row.phase,
        f"{row.nbytes / 1e6:.2f}",
        _ms(row.wire),
        _ms(row.hidden),
        _ms(row.exposed),
        because,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:.2f}"
