"""Draws the timeline of a profiled step as SVG, for tools/docs_figures.py."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import fsdp_ext
from fsdp_ext._util.files import write_bytes
from fsdp_ext.profiler.recording import COMPUTE, LANES, WAITS, WIRES, Iteration, Span

ROWS = ("compute", "gather", "reduce")
COLOURS = {
    "unit forward": "#7ba7d7",
    "unit backward": "#b3d2ec",
    "root": "#dbe3ec",
    "other": "#d9d9d9",
    "gather": "#54a24b",
    "reduce": "#f58518",
    "copies": "#ffd8a8",
    "wait": "#e45756",
}
LABELS = {
    "unit forward": "forward of a layer",
    "unit backward": "backward of a layer",
    "root": "the root's own (embedding, head)",
    "other": "loss, optimizer",
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "copies": "pack",
    "wait": "waiting (exposed)",
}
FONT = 7.5
POINTS_A_LETTER = 0.56 * FONT
WIDTH = 13.0  # inches


@dataclass(frozen=True)
class Bar:
    """A bar on a row, from `begin` to `end`, labelled with the first of its texts that fits."""

    row: str
    begin: float
    end: float
    kind: str
    texts: tuple[str, ...] = ()


def short_name(prof: fsdp_ext.profile, units: tuple[int, int]) -> str:
    """Return "root", "3" for layers.3, or "4-7" for a bucket of layers."""
    names = [prof.names[unit].removeprefix("layers.") for unit in units]
    names = ["root" if name == "the root" else name for name in names]
    return names[0] if units[0] == units[1] else f"{names[0]}-{names[1]}"


def bars_of(prof: fsdp_ext.profile, step: Iteration, behind: str = "optimizer") -> list[Bar]:
    """Return the bars of a step's timeline, those in the foreground last.

    Args:
        prof: the profile.
        step: one of its steps.
        behind: the label of the time after backward.
    """
    forward, backward = step.of("forward")[0], step.of("backward")[0]
    bars = [
        Bar("compute", forward.end, backward.begin, "other", ("loss",)),
        Bar("compute", backward.end, step.end, "other", (behind,)),
        *root_bars(step),
    ]
    for span in step.spans:
        name = short_name(prof, span.units) if span.first >= 0 else ""
        if span.work in WIRES:
            bars.append(bar_of(span, span.work, span.work, name))
        elif span.work in LANES:
            bars.append(bar_of(span, LANES[span.work], "copies"))
        elif span.work in WAITS:
            bars.append(bar_of(span, "compute", "wait"))
        elif span.work in COMPUTE and name != "root":
            bars.append(bar_of(span, "compute", span.work, name))
    return sorted(bars, key=lambda bar: bar.kind == "wait")


def bar_of(span: Span, row: str, kind: str, name: str = "") -> Bar:
    """Return a span's bar; `name` gives it a label such as "gather 3", if need be on two lines."""
    what = span.work.removeprefix("unit ")
    texts = (f"{what} {name}", f"{what}\n{name}", name) if name else ()
    return Bar(row, span.begin, span.end, kind, texts)


def root_bars(step: Iteration) -> list[Bar]:
    """Return the bars of the root's own compute: its spans without the units within them."""
    inside = [span for span in step.of(*COMPUTE, *WAITS) if span.first != 0 or span.work in WAITS]
    bars = []
    for span in (span for span in step.of(*COMPUTE) if span.first == 0):
        begin = span.begin
        for other in sorted(inside, key=lambda one: one.begin):
            if span.begin <= other.begin < span.end:
                bars.append(Bar("compute", begin, max(begin, other.begin), "root", ("root",)))
                begin = max(begin, other.end)
        bars.append(Bar("compute", begin, max(begin, span.end), "root", ("root",)))
    return bars


def draw_bars(axis: Axes, bars: Iterable[Bar], start: float, width: float) -> None:
    """Draw bars on the rows of an axis.

    Args:
        axis: its x is the time in ms.
        bars: to draw.
        start: the time at which x is 0, seconds.
        width: of the axis, ms.
    """
    points_a_ms = 0.92 * WIDTH * 72 / width
    groups: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        left, length = (bar.begin - start) * 1e3, (bar.end - bar.begin) * 1e3
        groups[bar.row, bar.kind].append((left, length))
        room = length * points_a_ms
        text = next((one for one in bar.texts if points_of(one) < room), "")
        if text:
            axis.text(
                left + length / 2, level(bar.row), text, ha="center", va="center", fontsize=FONT
            )
    for (row, kind), extents in groups.items():
        axis.broken_barh(
            extents,
            (level(row) - 0.4, 0.8),
            facecolors=COLOURS[kind],
            edgecolors="white",
            linewidth=0.4,
            hatch="///" if kind == "wait" else None,
        )
    axis.set_yticks(range(len(ROWS)), reversed(ROWS))
    axis.set_ylim(-0.5, len(ROWS) - 0.5)
    axis.set_xlim(0, width)
    axis.spines[["top", "right"]].set_visible(False)


def points_of(text: str) -> float:
    """Return the approximate width of a text in points (1/72 inch)."""
    return max(len(line) for line in text.splitlines()) * POINTS_A_LETTER


def level(row: str) -> int:
    """Return the y of a row; the first row is at the top."""
    return len(ROWS) - 1 - ROWS.index(row)


def figures_of(step: Iteration, wire: str) -> str:
    """Return the figures of a step for a title."""
    return (
        f"step {step.step * 1e3:.1f} ms = compute {step.compute * 1e3:.1f} + exposed "
        f"{step.exposed * 1e3:.1f} + optimizer {step.optimizer * 1e3:.1f} + other "
        f"{step.other * 1e3:.1f}; {wire} {step.wire * 1e3:.1f} ms"
    )


def new_figure(height: float) -> Figure:
    """Return an SVG figure of the common width and of `height` inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def finish(
    figure: Figure, axes: Sequence[Axes], kinds: Iterable[str], path: Path, unit: str
) -> None:
    """Add the legend to a figure of timelines, and write it."""
    kinds = set(kinds)
    handles = [
        Patch(facecolor=COLOURS[kind], label=label, hatch="///" if kind == "wait" else None)
        for kind, label in LABELS.items()
        if kind in kinds
    ]
    figure.legend(
        handles=handles, ncols=len(handles), fontsize=FONT, loc="outside upper left", frameon=False
    )
    axes[-1].set_xlabel(unit, fontsize=FONT + 1)
    write_svg(figure, path)


def write_svg(figure: Figure, path: Path) -> None:
    """Write a figure without a date and with constant ids, so that a rerun changes only times."""
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    write_bytes(path, data.getvalue())
    print(path)
