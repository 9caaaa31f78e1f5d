"""Draws the figures of docs/how-fsdp-works.md from steps that ran.

    python tools/docs_figures.py --out docs/figures

Small models train with `fsdp_ext.profile` over simulated links, each as fast as the figure asks for
relative to the compute that was measured first; one figure is of two real ranks over shared memory.
Of each profile the step is shown that other programs disturbed least: the one whose length and wire
time add up to least. A rerun changes times, and nothing else.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn
from torch.nn.functional import cross_entropy

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext._util.files import write_bytes
from fsdp_ext.profiler.recording import COMPUTE, LANES, WAITS, WIRES, Iteration, Span

WORLD_SIZE = 8  # of the simulated ranks
VOCABULARY = 512
DIM = 256
TOKENS = 256  # a rank and step
WARMUP = 3
STEPS = 40
ALPHA = 20e-6  # seconds; of the simulated links, where a figure does not ask for another
NO_TIME = Simulated(WORLD_SIZE, Link("no time", alpha=0.0, beta=1e30))
LATE = "DOCS_FIGURES_LATE_RANK"  # set where this runs as one of two real ranks
LATE_SECONDS = 15e-3


# - What trains


class Layer(nn.Module):
    """A feed-forward block: all of a layer's parameters that a timeline needs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Layers between an embedding and a head, which are the root's."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Run:
    """A profile, and what its model's schedule allocated (`core.memory()`, bytes)."""

    prof: fsdp_ext.profile
    memory: dict[str, int]

    @property
    def step(self) -> Iteration:
        """The step that is shown; the last one ends with the profile and not with the optimizer."""
        return min(self.prof.iterations[:-1], key=lambda one: one.step + one.wire)


def train(
    transport: Simulated | str,
    layers: int = 4,
    dim: int = DIM,
    before_step: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Run:
    """Train a model whose layers, and rest, are units, and profile it.

    Args:
        transport: what its ranks communicate by.
        layers: how many.
        dim: their width.
        before_step: called before each forward.
        settings: of the root's `fully_shard`.
    """
    torch.manual_seed(0)
    model: Any = Model(layers, dim)
    for layer in model.layers:
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (TOKENS,))

    def step() -> None:
        before_step()
        cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        step()
    with fsdp_ext.profile(model) as prof:
        for _ in range(STEPS):
            step()
    return Run(prof, model._unit.root.core.memory())


def transport_of(ratio: float, free: Run) -> Simulated:
    """Return a link over which all collectives of a step take 1 / `ratio` of its compute.

    Args:
        ratio: compute over simulated wire.
        free: the same training over a link that takes no time.
    """
    collectives = free.step.of(*WIRES)
    seconds = free.step.compute / ratio - len(collectives) * ALPHA
    nbytes = sum(span.nbytes for span in collectives)
    link = Link(f"compute = {ratio:g} x wire", alpha=ALPHA, beta=nbytes / seconds)
    return Simulated(WORLD_SIZE, link)


# - How a step is drawn

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
    """Something on a row, from `begin` to `end`; of its texts the first that fits is written."""

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
    """Return what a step's timeline shows, what is in front last.

    Args:
        behind: what comes after backward.
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
    """Return a span's bar; with `name`, one that says "gather 3", on two lines if need be."""
    what = span.work.removeprefix("unit ")
    texts = (f"{what} {name}", f"{what}\n{name}", name) if name else ()
    return Bar(row, span.begin, span.end, kind, texts)


def root_bars(step: Iteration) -> list[Bar]:
    """Return what the root computes itself: its spans without those of what is inside."""
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
    """Draw bars on rows of `axis`, whose x is ms after `start`.

    Args:
        width: ms that the axis shows.
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
    """Return about how wide a text is, 1/72 inch."""
    return max(len(line) for line in text.splitlines()) * POINTS_A_LETTER


def level(row: str) -> int:
    """Return how high a row is, the first one on top."""
    return len(ROWS) - 1 - ROWS.index(row)


def figures_of(step: Iteration, wire: str) -> str:
    """Return a step's figures, for a title."""
    return (
        f"step {step.step * 1e3:.1f} ms = compute {step.compute * 1e3:.1f} + exposed "
        f"{step.exposed * 1e3:.1f} + other {step.other * 1e3:.1f}; {wire} {step.wire * 1e3:.1f} ms"
    )


def draw_steps(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """Draw a step of each run over a simulated link, all on one scale."""
    width = max(run.step.step for _, run in runs) * 1e3 * 1.01
    figure = new_figure(0.6 + 1.75 * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    kinds = set()
    for axis, (title, run) in zip(axes, runs, strict=True):
        bars = bars_of(run.prof, run.step)
        kinds |= {bar.kind for bar in bars}
        draw_bars(axis, bars, run.step.begin, width)
        title = f"{title}: {figures_of(run.step, 'simulated wire')}"
        axis.set_title(title, loc="left", fontsize=FONT + 1.5)
    finish(figure, list(axes), kinds, path, "ms, over a simulated wire")


def new_figure(height: float) -> Figure:
    """Return a figure of the common width, `height` inches high, to be written as SVG."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def finish(
    figure: Figure, axes: Sequence[Axes], kinds: Iterable[str], path: Path, unit: str
) -> None:
    """Write a figure of timelines with its legend."""
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
    """Write it without a date and with ids that stay, so that a rerun changes times alone."""
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    write_bytes(path, data.getvalue())
    print(path)


# - The figures


def draw_step(out: Path) -> None:
    """Draw steps over a wire that compute covers, also without prefetch, and over a slow one."""
    free = train(NO_TIME, bucket_bytes=0)
    fast, slow = transport_of(2.0, free), transport_of(0.5, free)
    covered = train(fast, bucket_bytes=0)
    draw_steps([("compute = 2 x wire", covered)], out / "step.svg")
    alone = train(fast, bucket_bytes=0, prefetch=0)
    draw_steps([("prefetch=1", covered), ("prefetch=0", alone)], out / "no-prefetch.svg")
    too_slow = train(slow, bucket_bytes=0)
    draw_steps([("compute = 0.5 x wire", too_slow)], out / "slow-wire.svg")


def draw_buckets(out: Path) -> None:
    """Draw a step of small units over a link of high latency, each by itself and in buckets."""
    shape: dict[str, Any] = {"layers": 16, "dim": 64}
    free = train(NO_TIME, bucket_bytes=0, **shape)
    layers = [span for span in free.step.of("unit forward") if span.first > 0]
    forward = sum(span.seconds for span in layers) / len(layers)
    nbytes = next(span.nbytes for span in free.step.of("gather") if span.first > 0)
    # A layer's gather takes 2.5 times as long as its forward, one of four layers as long as theirs.
    link = Link("latency", alpha=2 * forward, beta=nbytes / (0.5 * forward))
    transport = Simulated(WORLD_SIZE, link)
    alone = train(transport, bucket_bytes=0, **shape)
    merged = train(transport, bucket_bytes=4 * nbytes, **shape)
    draw_steps([("each layer by itself", alone), ("buckets of four", merged)], out / "buckets.svg")


def held(run: Run) -> list[tuple[float, float, int]]:
    """Return when each unit's unsharded parameters were in a slot: (begin, end, bytes).

    From where their gather began, or their pass where they were still there, to where they were
    released: behind their forward and backward; the root's, behind the whole backward.
    """
    step, sizes = run.step, run.prof.sizes
    gathers = {(span.first, span.phase): span.begin for span in step.of("gather")}
    begin = gathers[0, "forward"]
    spans = [(begin, step.of("backward")[0].end, sizes[0])]
    for span in step.of(*COMPUTE):
        if span.first > 0:
            begin = gathers.get((span.first, span.phase), span.begin)
            spans.append((begin, span.end, sizes[span.first]))
    return spans


def draw_memory(out: Path) -> None:
    """Draw the unsharded bytes in slots over a step, for several prefetch depths."""
    layers = 12
    free = train(NO_TIME, layers=layers, bucket_bytes=0)
    transport = transport_of(2.0, free)
    depths = (0, 1, 2)
    runs = [train(transport, layers=layers, bucket_bytes=0, prefetch=depth) for depth in depths]
    figure = new_figure(0.5 + 1.75 * len(runs))
    axes = figure.subplots(len(runs), 1, sharey=True)
    for axis, depth, run in zip(axes, depths, runs, strict=True):
        changes = sorted(
            change
            for begin, end, nbytes in held(run)
            for change in ((begin, nbytes), (end, -nbytes))
        )
        times = [(moment - run.step.begin) * 1e3 for moment, _ in changes]
        total, totals = 0, []
        for _, change in changes:
            total += change
            totals.append(total / 1e6)
        axis.fill_between(times, totals, step="post", color=COLOURS["unit backward"])
        allocated = (run.memory["ring_bytes"] + run.memory["unit_bytes"]) / 1e6
        whole = sum(run.prof.sizes) / 1e6
        axis.axhline(allocated, color=COLOURS["gather"])
        axis.axhline(whole, color=COLOURS["wait"], linestyle="--")
        texts = (
            (allocated, "allocated: the ring and the root's buffer"),
            (whole, "the whole model"),
        )
        for height, text in texts:
            axis.text(0, height, f" {text}, {height:.1f} MB", va="bottom", fontsize=FONT)
        slots = run.memory["ring_slots"]
        title = f"prefetch={depth}: {slots} slot{'s'[: slots - 1]}, {layers} layers"
        axis.set_title(f"{title}, simulated wire", loc="left", fontsize=FONT + 1.5)
        axis.set_ylabel("MB", fontsize=FONT + 1)
        axis.set_ylim(0, 1.2 * whole)
        axis.set_xlim(0, run.step.step * 1e3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms, over a simulated wire", fontsize=FONT + 1)
    write_svg(figure, out / "memory.svg")


# - Two real ranks


def draw_late_rank(out: Path) -> None:
    """Have two ranks train over shared memory, one of which comes late to each step."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(__file__, "--out", str(out)),
    ]
    environment = {**os.environ, LATE: "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)


def run_rank(out: Path) -> None:
    """Be one of them."""
    dist.init_process_group("gloo")
    late_rank = int(os.environ[LATE])

    def come_late() -> None:
        if dist.get_rank() == late_rank:
            time.sleep(LATE_SECONDS)

    run = train("shared_memory", before_step=come_late, bucket_bytes=0)
    run.prof.merge()
    if dist.get_rank() == 0:
        draw_ranks(run, late_rank, out / "late-rank.svg")
    dist.barrier()
    dist.destroy_process_group()


def draw_ranks(run: Run, late_rank: int, path: Path) -> None:
    """Draw one step on all ranks, by one clock."""
    steps = {
        rank: next(one for one in of_rank if one.number == run.step.number)
        for rank, of_rank in run.prof.ranks.items()
    }
    start = min(step.begin for step in steps.values())
    width = (max(step.end for step in steps.values()) - start) * 1e3 * 1.01
    figure = new_figure(0.6 + 1.75 * len(steps))
    axes = figure.subplots(len(steps), 1, sharex=True)
    kinds = set()
    for axis, (rank, step) in zip(axes, steps.items(), strict=True):
        late, behind = "", "optimizer"
        if rank == late_rank:
            late = f", which sleeps {LATE_SECONDS * 1e3:g} ms before its forward"
            behind = "optimizer, sleep"
        bars = bars_of(run.prof, step, behind)
        kinds |= {bar.kind for bar in bars}
        draw_bars(axis, bars, start, width)
        title = f"rank {rank}{late}: {figures_of(step, 'collectives')}"
        axis.set_title(title, loc="left", fontsize=FONT + 1.5)
    finish(figure, list(axes), kinds, path, "ms; two ranks of one host over shared memory")


def main() -> int:
    """Draw all figures; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the figures of docs/how-fsdp-works.md.")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="directory")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # the lanes' threads have a core of their own
    if LATE in os.environ:
        run_rank(out)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message="fsdp_ext: .* simulated ranks")
    for draw in (draw_step, draw_memory, draw_buckets, draw_late_rank):
        draw(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
