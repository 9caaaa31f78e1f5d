"""Draws the figures of docs/how-fsdp-works.md from steps that ran.

    python tools/docs_figures.py --out docs/figures

Small models train with `fsdp_ext.profile` over simulated links. The compute is measured first, and
each link gets the speed relative to it that the figure needs. One figure shows two real ranks over
shared memory. A figure shows the step of its profile that other programs disturbed least: the step
whose length and wire time have the smallest sum. Running it again changes only the times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_timeline import (
    COLOURS,
    FONT,
    bars_of,
    draw_bars,
    figures_of,
    finish,
    new_figure,
    write_svg,
)
from torch import nn
from torch.nn.functional import cross_entropy

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.profiler.recording import COMPUTE, WIRES, Iteration

WORLD_SIZE = 8  # of the simulated ranks
VOCABULARY = 512
DIM = 256
TOKENS = 256  # of a rank in a step
WARMUP = 3
STEPS = 40
ALPHA = 20e-6  # default latency of the simulated links, seconds
NO_TIME = Simulated(WORLD_SIZE, Link("no time", alpha=0.0, beta=1e30))
LATE = "DOCS_FIGURES_LATE_RANK"  # variable that is set in the two real ranks
LATE_SECONDS = 15e-3


# - Training


class Layer(nn.Module):
    """A feed-forward block, which is enough of a layer for a timeline."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Layers between an embedding and a head; the latter two belong to the root unit."""

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
    """A profile, and the bytes that its model's schedule allocated (`core.memory()`)."""

    prof: fsdp_ext.profile
    memory: dict[str, int]

    @property
    def step(self) -> Iteration:
        """The step to show, never the last one, which ends with the profile, not the optimizer."""
        return min(self.prof.iterations[:-1], key=lambda one: one.step + one.wire)


def train(
    transport: Simulated | str,
    layers: int = 4,
    dim: int = DIM,
    before_step: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Run:
    """Train a model, of which each layer and the rest are units, and profile it.

    Args:
        transport: of all units.
        layers: number of layers.
        dim: width of the model.
        before_step: called before each forward.
        settings: further arguments of the root's `fully_shard`.
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
    return Run(prof, model._fsdp_ext_unit.root.impl.memory())


def transport_of(ratio: float, free: Run) -> Simulated:
    """Return a transport whose collectives take 1 / `ratio` of the compute of a step.

    Args:
        ratio: compute / simulated wire.
        free: the same training over a link that takes no time.
    """
    collectives = free.step.of(*WIRES)
    seconds = free.step.compute / ratio - len(collectives) * ALPHA
    nbytes = sum(span.nbytes for span in collectives)
    link = Link(f"compute = {ratio:g} x wire", alpha=ALPHA, beta=nbytes / seconds)
    return Simulated(WORLD_SIZE, link)


def draw_steps(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """Draw a step of each run over a simulated link, all with the same scale."""
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


# - The figures


def draw_step(out: Path) -> None:
    """Draw steps over a fast wire, with and without prefetch, and over a slow one."""
    free = train(NO_TIME, bucket_bytes=0)
    fast, slow = transport_of(2.0, free), transport_of(0.5, free)
    covered = train(fast, bucket_bytes=0)
    draw_steps([("compute = 2 x wire", covered)], out / "step.svg")
    alone = train(fast, bucket_bytes=0, prefetch=0)
    draw_steps([("prefetch=1", covered), ("prefetch=0", alone)], out / "no-prefetch.svg")
    too_slow = train(slow, bucket_bytes=0)
    draw_steps([("compute = 0.5 x wire", too_slow)], out / "slow-wire.svg")


def draw_buckets(out: Path) -> None:
    """Draw steps of small units over a link of high latency, unbucketed and in buckets."""
    shape: dict[str, Any] = {"layers": 16, "dim": 64}
    free = train(NO_TIME, bucket_bytes=0, **shape)
    layers = [span for span in free.step.of("unit forward") if span.first > 0]
    forward = sum(span.seconds for span in layers) / len(layers)
    nbytes = next(span.nbytes for span in free.step.of("gather") if span.first > 0)
    # The gather of a layer takes 2.5 times as long as its forward. A gather of four layers takes as
    # long as their forward.
    link = Link("latency", alpha=2 * forward, beta=nbytes / (0.5 * forward))
    transport = Simulated(WORLD_SIZE, link)
    alone = train(transport, bucket_bytes=0, **shape)
    merged = train(transport, bucket_bytes=4 * nbytes, **shape)
    draw_steps([("each layer by itself", alone), ("buckets of four", merged)], out / "buckets.svg")


def held(run: Run) -> list[tuple[float, float, int]]:
    """Return when each unit's unsharded parameters were in memory: (begin, end, bytes).

    They are in memory from the begin of their gather, or of their pass if no gather was needed, to
    the end of their forward or backward. The root's stay to the end of the whole backward.
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
    """Draw the bytes of unsharded parameters over a step, for several prefetch depths."""
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
        allocated = (run.memory["ring_bytes"] + run.memory["bucket_buffer_bytes"]) / 1e6
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
    """Let two ranks train over shared memory, one of which is late in each step."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(__file__, "--out", str(out)),
    ]
    environment = {**os.environ, LATE: "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)


def run_rank(out: Path) -> None:
    """Run one of the two ranks."""
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
    """Draw the same step on all ranks, by one clock."""
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
    torch.set_num_threads(1)  # leaves a core for the lanes' threads
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
