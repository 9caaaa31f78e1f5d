"""A profile as a picture: the work of each lane in one step."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_ext._util.files import write_bytes
from fsdp_ext.profiler.recording import COMPUTE, OPTIMIZER, PASSES, WAITS, Iteration, Span
from fsdp_ext.profiler.result import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "update": "#72b7b2",
    "step": "#72b7b2",
    "wait (gather)": "#e45756",
    "wait (reduction)": "#e45756",
    "other": "#d9d9d9",
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
    "step": "optimizer",
    "other": "other (loss, data)",
}
# The legend has these only if the step has such work.
_OPTIONAL = {"all-reduce": ("all-reduce",), "step": OPTIMIZER}
_WIDTH = 14.0  # of the picture, inches
_FONT = 7.0  # of names in bars, points
# The share of the picture's width for a character of a name, and for the margins of a name.
_CHARACTER = 0.56 * _FONT / (0.92 * _WIDTH * 72)
_DARK = ("unit forward",)  # bars whose names are white
_MOST_RANKS = 8


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
    figure = Figure(figsize=(_WIDTH, 1.2 + 0.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    begin = min(iteration.begin for iteration in shown.values())
    end = max(iteration.end for iteration in shown.values())
    for axis, (rank, iteration) in zip(axes, shown.items(), strict=True):
        _draw_rank(recording, _Panel(axis, begin, end - begin), iteration)
        if len(shown) > 1:
            axis.set_title(f"rank {rank}", loc="left", fontsize=9)
    figure.suptitle(_title(recording, own, len(shown)), fontsize=11)
    axes[-1].set_xlabel("ms")
    _legend(figure, own)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip(".") or "png", dpi=120)
    write_bytes(path, data.getvalue())


def _rows_of(iteration: Iteration) -> list[str]:
    return ["compute", "gather", "reduce", *(["all-reduce"] if iteration.of("all-reduce") else [])]


def _chosen_step(iterations: list[Iteration], chosen: int | None) -> Iteration:
    """Return the step at index ``chosen``, or the one of median length."""
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
    simulated = "simulated " if recording.is_simulated else ""
    ranks = len(recording.ranks)
    return (
        f"step {own.step * 1e3:.2f} ms = compute {own.compute * 1e3:.2f} + exposed "
        f"{own.exposed * 1e3:.2f} + optimizer {own.optimizer * 1e3:.2f} + other "
        f"{own.other * 1e3:.2f}    "
        f"{simulated}wire {own.wire * 1e3:.2f} ms    rank {recording.rank}"
        + (f"; {shown} of {ranks} ranks" if shown < ranks else "")
    )


@dataclass(frozen=True)
class _Panel:
    """The part of the picture with one rank's rows: ``seconds`` from ``begin`` on."""

    axis: Axes
    begin: float
    seconds: float

    def draw(
        self, begin: float, end: float, work: str, bottom: float, name: str = "", tall: float = 0.8
    ) -> None:
        """Draw a bar for a span, for a part of one, or for time outside of all spans."""
        left, length = (begin - self.begin) * 1e3, (end - begin) * 1e3
        waits = work in WAITS
        self.axis.broken_barh(
            [(left, length)],
            (bottom, tall),
            facecolors=_COLOURS[work],
            edgecolors="white",
            linewidth=0.4,
            zorder=3 if waits or work == "step" else 2,
            hatch="///" if waits else None,
        )
        name = _fitting(name, (end - begin) / self.seconds)
        if name:
            self.axis.text(
                left + length / 2,
                bottom + tall / 2,
                name,
                ha="center",
                va="center",
                fontsize=_FONT,
                color="white" if work in _DARK else "black",
                zorder=4,
            )


def _draw_rank(recording: Recording, panel: _Panel, iteration: Iteration) -> None:
    rows, axis = _rows_of(iteration), panel.axis
    for span in iteration.spans:
        has_name = span.work not in (*WAITS, "step")
        name = recording.name_of(span.units) if has_name else ""
        row = iteration.lane_of(span.work)
        level = len(rows) - 1 - rows.index(row or "compute")
        if span.work in PASSES:
            continue
        inside = [  # the compute of other units
            other
            for other in iteration.of(*COMPUTE if span.work in COMPUTE else ())
            if other is not span and span.begin <= other.begin and other.end <= span.end
        ]
        if inside:
            panel.draw(span.begin, span.end, span.work, level + 0.42, tall=0.08)
        waits = iteration.of(*WAITS, "step") if inside else []
        for begin, end in _gaps(span.begin, span.end, [*inside, *waits]):
            panel.draw(begin, end, span.work, level - 0.4, name)
    for begin, end in _gaps(iteration.begin, iteration.end, iteration.of(*PASSES, "step")):
        panel.draw(begin, end, "other", len(rows) - 1 - 0.4, "other")
    axis.set_xlim(0, panel.seconds * 1e3)
    axis.set_yticks(range(len(rows)), reversed(rows))
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)


def _gaps(begin: float, end: float, spans: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """Yield the parts of the time from ``begin`` to ``end`` that no span covers."""
    for span in sorted(spans, key=lambda span: span.begin):
        if begin < span.begin:
            yield begin, min(span.begin, end)
        begin = max(begin, span.end)
    if begin < end:
        yield begin, end


def _fitting(name: str, share: float) -> str:
    """Return the longest end of a name that fits a bar: whole, shortened, or empty.

    Args:
        name: the name of a unit or a bucket.
        share: the width of the bar, as a share of the picture's.
    """
    while name and (len(name) + 1) * _CHARACTER >= share:
        name = name.partition(".")[2]
    return name


def _legend(figure: Figure, iteration: Iteration) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_COLOURS[work], label=label, hatch="///" if work in WAITS else None)
        for work, label in _LABELS.items()
        if work not in _OPTIONAL or iteration.of(*_OPTIONAL[work])
    ]
    figure.legend(
        handles=handles, ncols=len(handles), fontsize=8, loc="outside lower left", frameon=False
    )
