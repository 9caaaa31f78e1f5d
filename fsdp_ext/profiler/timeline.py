"""A profile as a trace, and as a picture."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_ext._util.files import write_bytes
from fsdp_ext.profiler.recording import COMPUTE, LANES, WAITS, WIRES, Iteration, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fsdp_ext.profiler.api import profile

# Rows of a trace, from above: what is on one of them follows, or encloses, what is before it.
_COPIES = tuple(work for work in LANES if work not in WIRES)  # each in order, but not all of them
_ROWS = ("passes", "compute", *WIRES, *_COPIES)


def _row_of(span: Span) -> str:
    if span.work in LANES:
        return span.work
    return "compute" if span.work in (*COMPUTE, *WAITS) else "passes"


def trace(prof: profile) -> dict[str, Any]:
    """Return a profile in Chrome's trace event format, which Perfetto reads.

    A process for each rank; rows for passes, compute (units, and waits), gathers and reductions and
    the copies around them. Format: "Trace Event Format" of the Chromium project; times are
    microseconds after the first span.
    """
    events: list[dict[str, Any]] = []
    start = min(iteration.begin for of_rank in prof.ranks.values() for iteration in of_rank)
    for rank, iterations in prof.ranks.items():
        events.append(_name("process_name", rank, 0, f"rank {rank}, {prof.transport}"))
        for row, name in enumerate(_ROWS):
            events.append(_name("thread_name", rank, row, name))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": rank,
                    "tid": row,
                    "args": {"sort_index": row},
                }
            )
        for iteration in iterations:
            for place, span in enumerate(iteration.spans):
                event = _event(prof, rank, iteration, span, start)
                late = prof.late.get((iteration.number, place)) if rank == prof.rank else None
                if late is not None:
                    event["args"] |= {
                        "slowest rank": late.rank,
                        "first to last rank (us)": round(late.spread * 1e6, 1),
                    }
                events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _event(
    prof: profile, rank: int, iteration: Iteration, span: Span, start: float
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": iteration.number, "phase": span.phase}
    if span.nbytes:
        arguments |= {
            "bytes of all ranks": span.nbytes,
            "issued (us before it began)": round((span.begin - span.issued) * 1e6, 1),
            "on demand": span.on_demand,
        }
    what = span.work.replace("unit ", "")
    return {
        "ph": "X",
        "name": what if span.first < 0 else f"{what} {prof.name_of(span.units)}",
        "cat": span.work,
        "pid": rank,
        "tid": _ROWS.index(_row_of(span)),
        "ts": round((span.begin - start) * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": arguments,
    }


# - The picture

_COLOURS = {
    "unit forward": "#4c78a8",
    "unit backward": "#9ecae9",
    "gather": "#54a24b",
    "reduce": "#f58518",
    "cast": "#a6d49f",
    "unpack": "#a6d49f",
    "pack": "#ffbf79",
    "hand over": "#ffbf79",
    "wait (gather)": "#e45756",
    "wait (reduction)": "#e45756",
}
_LABELS = {
    "unit forward": "forward",
    "unit backward": "backward",
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "cast": "cast, unpack",
    "pack": "pack, hand over",
    "wait (gather)": "waiting (exposed)",
}
_PICTURE_ROWS = ("compute", "gather", "reduce")
# A name is written where it has so many hundredths of the picture's width.
_READABLE = 0.012
_MOST_RANKS = 8


def draw(prof: profile, path: Path, chosen: int | None) -> None:
    """See :meth:`fsdp_ext.profile.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"plot expects matplotlib but cannot import it ({error}); pip install matplotlib"
        ) from error
    iterations = prof.iterations
    if chosen is None:
        middle = statistics.median_low([iteration.step for iteration in iterations])
        chosen = next(i for i, one in enumerate(iterations) if one.step == middle)
    elif not -len(iterations) <= chosen < len(iterations):
        raise ValueError(f"plot expects one of {len(iterations)} steps but got number {chosen}")
    number = iterations[chosen].number
    others = [rank for rank in prof.ranks if rank != prof.rank]
    shown = {
        rank: next(one for one in prof.ranks[rank] if one.number == number)
        for rank in sorted([prof.rank, *others[: _MOST_RANKS - 1]])
    }
    height = 1.2 + 0.9 * len(_PICTURE_ROWS) * len(shown)
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    start = min(iteration.begin for iteration in shown.values())
    end = max(span.end for iteration in shown.values() for span in iteration.spans)
    for axis, (rank, iteration) in zip(axes, shown.items(), strict=True):
        _draw_rank(prof, axis, iteration, start, (end - start) * 1e3)
        if len(shown) > 1:
            axis.set_title(f"rank {rank}", loc="left", fontsize=9)
    own = iterations[chosen]
    simulated = "simulated " if prof.transport == "simulated" else ""
    figure.suptitle(
        f"step {own.step * 1e3:.2f} ms = compute {own.compute * 1e3:.2f} + exposed "
        f"{own.exposed * 1e3:.2f} + other {own.other * 1e3:.2f}    "
        f"{simulated}wire {own.wire * 1e3:.2f} ms    rank {prof.rank}"
        + (f"; {len(shown)} of {len(prof.ranks)} ranks" if len(shown) < len(prof.ranks) else ""),
        fontsize=11,
    )
    axes[-1].set_xlabel("ms")
    _legend(axes[0])
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip(".") or "png", dpi=120)
    write_bytes(path, data.getvalue())


def _draw_rank(prof: profile, axis: Axes, iteration: Iteration, start: float, width: float) -> None:
    for span in sorted(iteration.spans, key=lambda one: (one.work in COMPUTE, one.begin)):
        row = LANES.get(span.work) or ("compute" if span.work in (*COMPUTE, *WAITS) else None)
        if row is None:
            continue
        left, length = (span.begin - start) * 1e3, span.seconds * 1e3
        level = len(_PICTURE_ROWS) - 1 - _PICTURE_ROWS.index(row)
        encloses = span.work in COMPUTE and _encloses(iteration, span)
        bottom, tall = (level + 0.42, 0.08) if encloses else (level - 0.4, 0.8)
        axis.broken_barh(
            [(left, length)],
            (bottom, tall),
            facecolors=_COLOURS[span.work],
            edgecolors="white",
            linewidth=0.4,
            zorder=3 if span.work in WAITS else 2,
            hatch="///" if span.work in WAITS else None,
        )
        name = prof.name_of(span.units)
        if not encloses and span.work not in WAITS and length > _READABLE * len(name) * width:
            axis.text(
                left + length / 2, level, name, ha="center", va="center", fontsize=7, zorder=4
            )
    axis.set_yticks(range(len(_PICTURE_ROWS)), reversed(_PICTURE_ROWS))
    axis.set_ylim(-0.6, len(_PICTURE_ROWS) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)


def _encloses(iteration: Iteration, span: Span) -> bool:
    return any(
        other is not span and span.begin <= other.begin and other.end <= span.end
        for other in iteration.of(*COMPUTE)
    )


def _legend(axis: Axes) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_COLOURS[work], label=label, hatch="///" if work in WAITS else None)
        for work, label in _LABELS.items()
    ]
    axis.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        frameon=False,
    )
