"""A profile as a trace for Perfetto and chrome://tracing, alone or beside torch.profiler's."""

# Note [one time axis]
# The ledger's times are those of time.monotonic(). PyTorch writes times of the wall clock, as
# microseconds since "baseTimeNanoseconds". The two clocks are compared when the profile ends.

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
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

# Rows of a trace from top to bottom. Viewers need spans of one row to follow or enclose each other.
# Copies of one kind run in order, but copies of different kinds may overlap.
_COPIES = tuple(work for work in LANES if work not in COLLECTIVES)
_ROWS = ("passes", "compute", *COLLECTIVES, *_COPIES)
# Rows that exist only if they have spans.
_OPTIONAL = ("group gather", "all-reduce", "keep", "update")


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
    # When the clock of the events is at 0, and the number of rank 0's process.
    start, first = begin, 0
    if beside is not None:
        pids = [event["pid"] for event in beside["traceEvents"] if event.get("ph") == "X"]
        first = max((pid for pid in pids if isinstance(pid, int)), default=0) + 1
        start = _start_of(beside, recording)
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
    on_compute = span.work in (*COMPUTE, *WAITS, "step")
    row = span.work if span.work in LANES else "compute" if on_compute else "passes"
    return {
        "ph": "X",
        "name": what if span.first < 0 else f"{what} {recording.name_of(span.units)}",
        "cat": span.work,
        "pid": process,
        "tid": _ROWS.index(row),
        "ts": round((span.begin - start) * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": arguments,
    }


# - Traces of torch.profiler


def read_torch_trace(path: Path, recording: Recording) -> dict[str, Any]:
    """Read a trace of torch.profiler that was recorded while ``recording`` was.

    Returns:
        The trace, in Chrome's trace event format.
    """
    document = _read(path)
    start = _start_of(document, recording)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    begin, end = recording.iterations[0].begin, recording.iterations[-1].end
    if not any(begin < start + event["ts"] / 1e6 < end for event in events):
        raise ValueError(
            f"{path} has no event of the steps that this profile recorded. Let torch.profiler and "
            "fsdp_ext.profile record the same steps, in one process."
        )
    return document


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        document: Any = json.loads(data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(_refusal(path, f"it is no JSON ({error})")) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(_refusal(path, "it has no traceEvents"))
    if not isinstance(document.get("baseTimeNanoseconds"), int):
        raise ValueError(_refusal(path, "it has no baseTimeNanoseconds"))
    return document


def _refusal(path: Path, why: str) -> str:
    return (
        f"{path} is not a trace of torch.profiler: {why}. Pass a file that export_chrome_trace of "
        "the torch.profiler.profile has written."
    )


def _start_of(document: dict[str, Any], recording: Recording) -> float:
    """Return when the clock of its events was at 0, in seconds of ``time.monotonic()``."""
    seconds: float = (document["baseTimeNanoseconds"] - recording.wall_clock) / 1e9
    return seconds
