"""The figures of a profile as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdp_ext._util.tables import columns, sentence
from fsdp_ext.profiler.causes import MEANING, REMEDY, Cause
from fsdp_ext.profiler.result import Recording
from fsdp_ext.profiler.rows import Row, Summary, rows_of, summarise

# The report explains causes of at least this share of the exposed time.
_WORTH_A_LINE = 0.01

_HEADER = (
    "units",
    "operation",
    "phase",
    "wire MB",
    "ms",
    "hidden ms",
    "exposed ms",
    "because",
)


def text_of(recording: Recording, by: str) -> str:
    """Return the report that ``profile.report`` prints."""
    summary = summarise(recording)
    rows = [_cells(row) for row in rows_of(recording, by)]
    link = "a simulated link" if recording.is_simulated else recording.transport
    replicas = recording.replicas
    ranks = str(recording.world_size)
    if replicas > 1:
        ranks += f" ({replicas} shard groups of {recording.world_size // replicas})"
    lines = [
        f"Average of {summary.iterations} steps on rank {recording.rank} of {ranks} over {link}",
        "",
        *columns(_HEADER, rows, left=(0, 1, 2, len(_HEADER) - 1)),
        "",
        sentence(_sum_line(summary)),
    ]
    if recording.lost:
        lines.append(f"{recording.lost} older steps were not kept (iterations={recording.kept})")
    return "\n".join([*lines, *_explanations(summary)])


def _sum_line(summary: Summary) -> str:
    on_wire = (
        f"wire {_ms(summary.wire)} ms, {summary.hidden:.0%} of it hidden"
        if summary.wire
        else "nothing was on a wire"
    )
    return (
        f"step {_ms(summary.step)} ms ({_ms(summary.fastest)} to {_ms(summary.slowest)}) = "
        f"compute {_ms(summary.compute)} + exposed {_ms(summary.exposed)} + optimizer "
        f"{_ms(summary.optimizer)} + other {_ms(summary.other)}; {on_wire}"
    )


def _explanations(summary: Summary) -> list[str]:
    """Return two lines for each cause that matters: what it means, and what to do about it."""
    lines = []
    for name, seconds in summary.causes.items():
        share = seconds / summary.exposed if summary.exposed else 0.0
        if share >= _WORTH_A_LINE:
            lines += _explanation(f"{_ms(seconds)} ms ({share:.0%})", Cause(name))
    if summary.slowed:
        share = summary.slowed / summary.compute
        lines += _explanation(f"{_ms(summary.slowed)} ms ({share:.0%} of compute)", Cause.SLOWED)
    return lines


def _explanation(how_much: str, cause: Cause) -> list[str]:
    what = f"{how_much} {cause.value}: {MEANING[cause]}"
    return [sentence(what), sentence(REMEDY[cause], indent="    ")]


def document_of(recording: Recording) -> dict[str, Any]:
    """Return all figures and spans, as ``profile.to_json`` writes them.

    After a merge, "slowest" lists the straggler of each of this rank's collectives. "number" is the
    step's number and "span" the collective's index among the step's spans.
    """
    slow = recording.slowdown()
    return {
        "transport": recording.transport,
        "world_size": recording.world_size,
        "replicas": recording.replicas,
        "rank": recording.rank,
        "summary": asdict(summarise(recording)),
        "rows": [asdict(row) for row in rows_of(recording, "bucket")],
        "rows_by_unit": [asdict(row) for row in rows_of(recording, "unit")],
        "compute_slowed_by_communication": None if slow is None else asdict(slow),
        "iterations_lost": recording.lost,
        "units": list(recording.names),
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
            for rank, iterations in recording.ranks.items()
        },
        "slowest": [
            {"number": number, "span": index, **asdict(late)}
            for (number, index), late in sorted(recording.late.items())
        ],
    }


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
    return f"{seconds * 1e3:.2f}"
