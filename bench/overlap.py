"""How much of the wire's time is hidden behind compute, over a simulated link?

On one process, a stack of linear layers, each a unit, trains a step (forward and backward) on real
matrix products. The same step runs over a link that takes no time, and over one whose bandwidth is
such that all collectives of a step together (the wire time, by the schedule's own log) take 1/ratio
of that. Both run in turns; hidden = 1 - (difference of the two) / wire time. Every time that has a
wire in it is simulated; the compute is real.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

from bench.harness import Keep, UsageError, positive
from bench.output import picture, print_table
from bench.timing import Timing, as_microseconds
from fsdp_ext import Link, Simulated, fully_shard

TITLE = "overlap (simulated)"
WARMUP = 3
ALPHA = 20e-6  # seconds; of the simulated links
NO_TIME = Link("no time", alpha=0.0, beta=1e30)


class Training:
    """A model over one simulated link, and its step."""

    def __init__(
        self, link: Link, world_size: int, layers: int, dim: int, batch: int, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self.model: Any = nn.Sequential(
                *(nn.Linear(dim, dim, bias=False, dtype=dtype) for _ in range(layers))
            )
            self.input = torch.randn(batch, dim, dtype=dtype)
        transport = Simulated(world_size, link, multiprocessors=16 if device.type == "cuda" else 0)
        for layer in self.model:
            fully_shard(layer, transport=transport)
        fully_shard(self.model, transport=transport)

    def step(self) -> None:
        """Run forward and backward, to their end."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model(self.input).sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def collectives(self) -> list[tuple[str, int]]:
        """Return what a step sends: operations and bytes of all ranks."""
        core = self.model._unit.root.core
        core.enable_log(True)
        self.step()
        log = core.take_log()
        core.enable_log(False)
        return [(operation, size) for operation, _, _, size in log]


def seconds_of(training: Training) -> float:
    """Return how long one step takes."""
    start = time.perf_counter()
    training.step()
    return time.perf_counter() - start


def measure_ratio(
    ratio: float,
    world_size: int,
    layers: int,
    dim: int,
    batch: int,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """Return one row."""

    def train(link: Link) -> Training:
        training = Training(link, world_size, layers, dim, batch, device)
        for _ in range(WARMUP):
            training.step()
        return training

    free = train(NO_TIME)
    sent = free.collectives()
    compute = statistics.median(seconds_of(free) for _ in range(repeats))
    budget = compute / ratio - len(sent) * ALPHA
    if budget <= 0:
        raise UsageError(
            f"latencies alone ({len(sent)} x {ALPHA * 1e6:.0f} us) take 1/{ratio:g} of the compute "
            f"({compute * 1e3:.1f} ms); give a smaller --ratio"
        )
    beta = sum(size for _, size in sent) / budget
    link = Link(f"{beta / 1e9:.2f} GB/s", alpha=ALPHA, beta=beta)
    wire = sum(link.seconds(operation, size) for operation, size in sent)
    wired = train(link)
    without, with_wire = [], []
    for _ in range(repeats):  # in turns, and each pair compared: noise is slower than a step
        without.append(seconds_of(free))
        with_wire.append(seconds_of(wired))
    exposed = [after - before for before, after in zip(without, with_wire, strict=True)]
    hidden = [1 - value / wire for value in exposed]
    return {
        "transport": "simulated",
        "link": f"simulated: {link.name}, {ALPHA * 1e6:.0f} us",
        "simulated_ranks": world_size,
        "layers": layers,
        "dim": dim,
        "collectives": len(sent),
        "compute_us": as_microseconds(Timing.of(without)),
        "simulated_wire_us": wire * 1e6,
        "simulated_step_us": as_microseconds(Timing.of(with_wire)),
        "compute_over_simulated_wire": statistics.median(without) / wire,
        "simulated_hidden": statistics.median(hidden),
        "simulated_hidden_low": statistics.quantiles(hidden, n=4)[0],
        "simulated_hidden_high": statistics.quantiles(hidden, n=4)[2],
        # The first gather and the last reduction have nothing to hide behind.
        "simulated_hidden_at_most": 1 - 2 / len(sent),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated."""
    parser.add_argument("--ratio", type=float, help="compute time / wire time; default: a sweep")
    parser.add_argument(
        "--world-size", type=positive, default=1024, metavar="N", help="simulated ranks"
    )


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure at each ratio of compute to wire."""
    if args.ratio is not None and args.ratio <= 0:
        raise UsageError(f"--ratio expects a positive number but got {args.ratio:g}")
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    layers, dim, batch = (32, 8192, 4096) if on_gpu else (32, 1024, 128)
    ratios = [args.ratio] if args.ratio else [2.0] if args.quick else [4.0, 2.0, 1.0, 0.5]
    warnings.filterwarnings("ignore", message="fsdp_ext: .*simulated")  # said in the table
    repeats = 8 if args.quick else 24
    for ratio in ratios:
        keep(measure_ratio(ratio, args.world_size, layers, dim, batch, device, repeats))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    first = rows[0]
    print(
        f"{first['layers']} layers of {first['dim']}, {first['simulated_ranks']} simulated ranks; "
        "the compute is real"
    )
    header = ["compute / simulated wire", "compute ms", "simulated wire ms", "simulated step ms"]
    header += ["simulated hidden", "quartiles", "at most"]
    table = [
        [
            f"{row['compute_over_simulated_wire']:.2f}",
            f"{row['compute_us']['median'] / 1e3:.1f}",
            f"{row['simulated_wire_us'] / 1e3:.1f}",
            f"{row['simulated_step_us']['median'] / 1e3:.1f}",
            f"{row['simulated_hidden']:.1%}",
            f"{row['simulated_hidden_low']:.1%} to {row['simulated_hidden_high']:.1%}",
            f"{row['simulated_hidden_at_most']:.1%}",
        ]
        for row in rows
    ]
    print_table(header, table)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw what is hidden over compute / wire, beside the most that could be: min(1, ratio)."""
    ordered = sorted(rows, key=lambda row: row["compute_over_simulated_wire"])
    ratios = [row["compute_over_simulated_wire"] for row in ordered]
    hidden = [row["simulated_hidden"] for row in ordered]
    below = [row["simulated_hidden"] - row["simulated_hidden_low"] for row in ordered]
    above = [row["simulated_hidden_high"] - row["simulated_hidden"] for row in ordered]
    most = max(*ratios, 1.0)
    with picture(path, f"{ordered[0]['simulated_ranks']} simulated ranks") as axes:
        axes.plot([0, 1, most], [0, 1, 1], color="grey", linestyle="--", label="min(1, ratio)")
        axes.errorbar(ratios, hidden, [below, above], marker="o", capsize=3, label="ours")
        axes.set(xlabel="compute / simulated wire", ylabel="simulated wire hidden")
        axes.set_ylim(bottom=min(0.0, *hidden))
        axes.legend()
