"""A profile as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_ext.profiler.recording import (
    COLLECTIVES,
    COMPUTE,
    LANES,
    OPTIMIZER,
    WAITS,
    Iteration,
    Span,
)
from fsdp_ext.profiler.result import Recording
from fsdp_ext.profiler.torch_trace import start_of

# Rows of a trace from top to bottom. Viewers need spans of one row to follow or enclose each other.
# Copies of one kind run in order, but copies of different kinds may overlap.
_COPIES = tuple(work for work in LANES if work not in COLLECTIVES)
_ROWS = ("passes", "compute", *COLLECTIVES, *_COPIES)
# Rows that exist only if they have spans.
_OPTIONAL = ("group gather", "all-reduce", "keep", "update")


def _row_of(span: Span) -> str:
    if span.work in LANES:
        return span.work
    return "compute" if span.work in (*COMPUTE, *WAITS, "step") else "passes"


def trace_of(recording: Recording, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a profile in Chrome's trace event format, which Perfetto reads.

    Each rank is a process. Its rows are the passes, compute (units, waits and the optimizer),
    gathers, reductions, all-reduces over replicas, each kind of copy around them, and updates. The
    format is the "Trace Event Format" of the Chromium project; times are microseconds since the
    first iteration began.

    Args:
        recording: the recording to show.
        beside: a trace of torch.profiler, whose events and time axis the result has, too.
    """
    events: list[dict[str, Any]] = []
    begin = min(iteration.begin for of_rank in recording.ranks.values() for iteration in of_rank)
    # The time of 0 microseconds, and the number of rank 0's process.
    start, first = begin, 0
    if beside is not None:
        pids = [event["pid"] for event in beside["traceEvents"] if event.get("ph") == "X"]
        first = max((pid for pid in pids if isinstance(pid, int)), default=0) + 1
        start = start_of(beside, recording)
    for rank, iterations in recording.ranks.items():
        works = {span.work for iteration in iterations for span in iteration.spans}
        rows = [row for row in _ROWS if row not in _OPTIONAL or row in works]
        events += _headings(first + rank, f"rank {rank}, {recording.transport}", rows)
        for iteration in iterations:
            for number, span in enumerate(iteration.spans):
                event = _event(recording, first + rank, iteration.number, span, start)
                event["args"] |= _since_reduction(iteration, span)
                late = recording.late.get((iteration.number, number))
                if late is not None and rank == recording.rank:
                    event["args"]["slowest rank"] = late.rank
                    event["args"]["first to last rank (us)"] = round(late.spread * 1e6, 1)
                events.append(event)
    if beside is not None:
        return {**beside, "traceEvents": [*beside["traceEvents"], *events]}
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _headings(process: int, name: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that name a rank's process and its rows, and that order the rows."""
    events = [_metadata("process_name", process, 0, {"name": name})]
    for row_name in rows:
        row = _ROWS.index(row_name)
        events.append(_metadata("thread_name", process, row, {"name": row_name}))
        events.append(_metadata("thread_sort_index", process, row, {"sort_index": row}))
    return events


def _metadata(kind: str, process: int, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": arguments}


def _since_reduction(iteration: Iteration, span: Span) -> dict[str, Any]:
    """Return how long an attached optimizer's update came after its bucket's reduction."""
    if span.work not in OPTIMIZER:
        return {}
    works = ("pack", "reduce", "all-reduce", "finish reduction")
    reductions = [one for one in iteration.of(*works) if one.units == span.units]
    ends = [one.end for one in reductions if one.end <= span.begin]
    if not ends:  # a step() after backward
        return {}
    return {"after its reduction (us)": round((span.begin - max(ends)) * 1e6, 1)}


def _event(
    recording: Recording, process: int, step: int, span: Span, start: float
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": step, "phase": span.phase}
    if span.nbytes:
        arguments |= {
            f"bytes of {'one rank' if span.work == 'all-reduce' else 'all ranks'}": span.nbytes,
            "issued (us before it began)": round((span.begin - span.issued) * 1e6, 1),
            "on demand": span.on_demand,
        }
    what = span.work.replace("unit ", "")
    return {
        "ph": "X",
        "name": what if span.first < 0 else f"{what} {recording.name_of(span.units)}",
        "cat": span.work,
        "pid": process,
        "tid": _ROWS.index(_row_of(span)),
        "ts": round((span.begin - start) * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": arguments,
    }
