"""A profile as a picture: what each lane of one step did."""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_ext._util.files import write_bytes
from fsdp_ext.profiler.recording import COMPUTE, WAITS, Iteration, Span
from fsdp_ext.profiler.result import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "unit forward": "#4c78a8",
    "unit backward": "#9ecae9",
    "gather": "#54a24b",
    "group gather": "#54a24b",
    "reduce": "#f58518",
    "all-reduce": "#b279a2",
    "cast": "#a6d49f",
    "unpack": "#a6d49f",
    "keep": "#a6d49f",
    "pack": "#ffbf79",
    "finish reduction": "#ffbf79",
    "wait (gather)": "#e45756",
    "wait (reduction)": "#e45756",
}
_LABELS = {
    "unit forward": "forward",
    "unit backward": "backward",
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all-reduce": "all-reduce",
    "cast": "cast, unpack",
    "pack": "pack, write gradients",
    "wait (gather)": "waiting (exposed)",
}
# A bar shows its name if there is this share of the picture's width for each character.
_READABLE = 0.012
_MOST_RANKS = 8


@dataclass(frozen=True)
class _Window:
    """The time that the picture shows: its begin and its length, in seconds."""

    begin: float
    seconds: float


def draw(recording: Recording, path: Path, chosen: int | None) -> None:
    """Draw one step to ``path``; see :meth:`fsdp_ext.profile.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"plot needs matplotlib, which cannot be imported ({error}). Run `pip install "
            "matplotlib`."
        ) from error
    own = _chosen_step(recording.iterations, chosen)
    shown = _steps_of_ranks(recording, own.number)
    rows = sum(len(_rows_of(iteration)) for iteration in shown.values())
    figure = Figure(figsize=(14, 1.2 + 0.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    begin = min(iteration.begin for iteration in shown.values())
    end = max(span.end for iteration in shown.values() for span in iteration.spans)
    for axis, (rank, iteration) in zip(axes, shown.items(), strict=True):
        _draw_rank(recording, axis, iteration, _Window(begin, end - begin))
        if len(shown) > 1:
            axis.set_title(f"rank {rank}", loc="left", fontsize=9)
    figure.suptitle(_title(recording, own, len(shown)), fontsize=11)
    axes[-1].set_xlabel("ms")
    _legend(axes[0], own)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip(".") or "png", dpi=120)
    write_bytes(path, data.getvalue())


def _rows_of(iteration: Iteration) -> list[str]:
    return ["compute", "gather", "reduce", *(["all-reduce"] if iteration.has_all_reduces else [])]


def _chosen_step(iterations: list[Iteration], chosen: int | None) -> Iteration:
    """Return the step at place ``chosen``, or the one of median length."""
    if chosen is None:
        middle = statistics.median_low([iteration.step for iteration in iterations])
        return next(one for one in iterations if one.step == middle)
    if not -len(iterations) <= chosen < len(iterations):
        raise ValueError(
            f"plot got iteration={chosen}, but {len(iterations)} steps were recorded. Pass a "
            f"number from 0 to {len(iterations) - 1}."
        )
    return iterations[chosen]


def _steps_of_ranks(recording: Recording, number: int) -> dict[int, Iteration]:
    """Return the step with this number of this rank and of a few others."""
    others = [rank for rank in recording.ranks if rank != recording.rank]
    return {
        rank: next(one for one in recording.ranks[rank] if one.number == number)
        for rank in sorted([recording.rank, *others[: _MOST_RANKS - 1]])
    }


def _title(recording: Recording, own: Iteration, shown: int) -> str:
    simulated = "simulated " if recording.transport == "simulated" else ""
    ranks = len(recording.ranks)
    return (
        f"step {own.step * 1e3:.2f} ms = compute {own.compute * 1e3:.2f} + exposed "
        f"{own.exposed * 1e3:.2f} + other {own.other * 1e3:.2f}    "
        f"{simulated}wire {own.wire * 1e3:.2f} ms    rank {recording.rank}"
        + (f"; {shown} of {ranks} ranks" if shown < ranks else "")
    )


def _draw_rank(recording: Recording, axis: Axes, iteration: Iteration, window: _Window) -> None:
    rows = _rows_of(iteration)
    for span in sorted(iteration.spans, key=lambda one: (one.work in COMPUTE, one.begin)):
        row = iteration.lane_of(span.work) or (
            "compute" if span.work in (*COMPUTE, *WAITS) else None
        )
        if row is None:
            continue
        left, length = (span.begin - window.begin) * 1e3, span.seconds * 1e3
        level = len(rows) - 1 - rows.index(row)
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
        name = recording.name_of(span.units)
        has_room = span.seconds > _READABLE * len(name) * window.seconds
        if has_room and not encloses and span.work not in WAITS:
            axis.text(
                left + length / 2, level, name, ha="center", va="center", fontsize=7, zorder=4
            )
    axis.set_yticks(range(len(rows)), reversed(rows))
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)


def _encloses(iteration: Iteration, span: Span) -> bool:
    """Return whether the compute of another unit lies inside this span."""
    return any(
        other is not span and span.begin <= other.begin and other.end <= span.end
        for other in iteration.of(*COMPUTE)
    )


def _legend(axis: Axes, iteration: Iteration) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_COLOURS[work], label=label, hatch="///" if work in WAITS else None)
        for work, label in _LABELS.items()
        if work != "all-reduce" or iteration.has_all_reduces
    ]
    axis.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        frameon=False,
    )
