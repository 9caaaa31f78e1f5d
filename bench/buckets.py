"""How large should buckets and messages be?

Everything runs in one process over a simulated link (alpha 20 us, beta 100 GB/s, 64 ranks).

The first tables train stacks of equal layers with buckets of several sizes. "simulated wire ms" is
the time of all collectives of a step: the sum of each collective's median, as the lanes' streams
measure it. Next to it is the prediction alpha * collectives + S / beta. Next to the step's time is
the prediction of planner.schedule.predict, from the step over a link that takes no time.

The last table has one unit with a single parameter, stored in fp32 and sent in bf16. It is sent
whole, and in messages of several sizes. "its copies" is the time of the gather (cast, wire, unpack)
or of the reduction (pack, wire, cast) minus the time of its wire. "of copies hidden" is the part of
that time that smaller messages hide behind the wire. All times with a wire in them are simulated;
copies are real.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.models.simulated_group import NO_TIME
from fsdp_ext import Link, MixedPrecisionPolicy, Simulated, fully_shard, profile
from fsdp_ext.planner.schedule import Stage, predict
from fsdp_ext.profiler.recording import WIRES

TITLE = "buckets (simulated)"
DEVICES = ("cpu",)
SIMULATED_RANKS = 64
FEW_RANKS = 8  # for the large unit, so that a rank's shard is large, too
LINK = Link("20 us, 100 GB/s", alpha=20e-6, beta=100e9)
MB = 10**6
WARMUP = 3


@dataclass(frozen=True)
class Shape:
    """A stack of square layers, each a unit."""

    layers: int
    dim: int

    def __str__(self) -> str:
        """Return the name in tables."""
        return f"{self.layers} x {self.dim**2 * 4 / MB:.2f} MB"


SHAPES = [Shape(200, 256), Shape(40, 1024), Shape(6, 4096)]
BUCKETS = [0, 1 * MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB, 32 * MB, 64 * MB]


class Training:
    """A model that trains over one simulated link."""

    def __init__(self, shape: Shape, link: Link, bucket_bytes: int | None) -> None:
        torch.manual_seed(0)
        transport = Simulated(SIMULATED_RANKS, link)
        layers = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(shape.layers))
        self.model: Any = nn.Sequential(*layers)
        for layer in self.model:
            fully_shard(layer, transport=transport)
        fully_shard(self.model, transport=transport, bucket_bytes=bucket_bytes)
        self.input = torch.randn(1, shape.dim)
        for _ in range(WARMUP):
            self.step()
        self.impl = self.model._fsdp_ext_unit.root.impl

    def step(self) -> float:
        """Run forward and backward; return the seconds."""
        for parameter in self.model.parameters():
            parameter.grad = None
        start = time.perf_counter()
        self.model(self.input).sum().backward()
        return time.perf_counter() - start

    def bytes_of_buckets(self) -> list[int]:
        """Return the bytes of each bucket's gather, of all ranks together."""
        return [bucket["gather_bytes"] for bucket in self.impl.buckets() if bucket["gather_bytes"]]


def schedule(buckets: Sequence[int], compute: float) -> float:
    """Return the seconds of a step that planner.schedule.predict computes.

    Args:
        buckets: bytes of each bucket's gather; its reduction has as many.
        compute: seconds of the whole step without a wire. A third of it is forward, and buckets
            share it in proportion to their bytes.
    """
    shares = [compute * nbytes / sum(buckets) for nbytes in buckets]
    stages = [
        Stage(f"bucket {number}", share / 3, share * 2 / 3, nbytes, nbytes)
        for number, (share, nbytes) in enumerate(zip(shares, buckets, strict=True))
    ]
    return predict(None, stages, LINK).step


def measure_buckets(shape: Shape, bucket_bytes: int | None, repeats: int) -> dict[str, Any]:
    """Measure one size of buckets; return the row."""
    free = Training(shape, NO_TIME, bucket_bytes if bucket_bytes is not None else default_bytes())
    wired = Training(shape, LINK, bucket_bytes)
    without, steps = [], []
    wired.impl.enable_log(True)
    for _ in range(repeats):
        without.append(free.step())
        steps.append(wired.step())
        sent = wired.impl.take_log()
    with profile(wired.model, iterations=repeats) as prof:
        for _ in range(repeats):
            wired.step()
    busy = [[span.seconds for span in iteration.of(*WIRES)] for iteration in prof.iterations]
    # The median of each collective over the steps leaves out threads that woke up late.
    taken = [statistics.median(durations) for durations in zip(*busy, strict=True)]
    predicted = sum(LINK.seconds(operation, nbytes) for operation, _, _, nbytes in sent)
    return {
        "shape": str(shape),
        "bucket_bytes": default_bytes() if bucket_bytes is None else bucket_bytes,
        "is_default": bucket_bytes is None,
        "buckets": len(wired.bytes_of_buckets()),
        "collectives": len(sent),
        "simulated_communication_ms": sum(taken) * 1e3,
        "simulated_communication_quartiles_ms": [
            value * 1e3 for value in statistics.quantiles(map(sum, busy), n=4, method="inclusive")
        ],
        "predicted_communication_ms": predicted * 1e3,
        "simulated_step_ms": statistics.median(steps) * 1e3,
        "predicted_step_ms": schedule(wired.bytes_of_buckets(), statistics.median(without)) * 1e3,
        "step_without_wire_ms": statistics.median(without) * 1e3,
        "slots_mb": wired.impl.memory()["ring_bytes"] / MB,
    }


def default_bytes() -> int:
    """Return fully_shard's default bucket size for the link."""
    from fsdp_ext.comm.costs import default_bucket_bytes

    return default_bucket_bytes(LINK)


def show_buckets(shape: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the curve of one shape."""

    def least(column: str) -> float:
        return min(row[column] for row in rows)

    print(f"{shape}, link {LINK.name}, {SIMULATED_RANKS} ranks (simulated)")
    header = ["bucket MB", "buckets", "collectives", "simulated wire ms", "predicted"]
    header += ["simulated step ms", "predicted", "without wire", "slots MB"]
    table = []
    for row in rows:
        size = f"{row['bucket_bytes'] / MB:.0f}{' (default)' if row['is_default'] else ''}"
        cells = [size, str(row["buckets"]), str(row["collectives"])]
        for column in (
            "simulated_communication_ms",
            "predicted_communication_ms",
            "simulated_step_ms",
            "predicted_step_ms",
        ):
            mark = " least" if row[column] == least(column) else ""
            cells.append(f"{row[column]:.2f}{mark}")
        table.append([*cells, f"{row['step_without_wire_ms']:.2f}", f"{row['slots_mb']:.1f}"])
    print_table(header, table)
    wire, predicted = "simulated_communication_ms", "predicted_communication_ms"
    alone = [row for row in rows if row["bucket_bytes"] == 0]
    chosen = [row for row in rows if row["is_default"]]
    if not (alone and chosen):  # the run was interrupted
        return
    (first,), (default,) = alone, chosen
    print(
        f"units by themselves take {first[wire] / default[wire]:.1f} times as long on the "
        "simulated wire as buckets of the default size, which take "
        f"{default[wire] / default[predicted]:.0%} of alpha * collectives + S / beta"
    )


# - One unit that is large


class OneParameter(nn.Module):
    """An embedding: a batch uses few of its rows, but all rows have gradients."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows."""
        return nn.functional.embedding(tokens, self.weight)


def phases(model: Any, tokens: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of gathers, of reductions, and of their wires and copies, by step."""
    with profile(model, iterations=repeats) as prof:
        for _ in range(repeats):
            model.weight.grad = None
            model(tokens).float().sum().backward()
    seconds: dict[str, list[float]] = {}
    for iteration in prof.iterations:
        for wire in ("gather", "reduce"):
            lane = iteration.lane(wire)
            whole = max(span.end for span in lane) - min(span.begin for span in lane)
            on_wire = sum(span.seconds for span in iteration.of(wire))
            seconds.setdefault(wire, []).append(whole)
            seconds.setdefault(f"{wire} wire", []).append(on_wire)
            seconds.setdefault(f"{wire} copies", []).append(whole - on_wire)
    return seconds


def measure_cut(
    nbytes: int, messages: Sequence[int | None], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the second part; the first row sends the whole unit in one message.

    The link is as fast as the slower one of the unit's copies. Over a slower link even large
    messages would hide the copies.
    """
    dist.destroy_process_group()  # the first part has another number of ranks
    columns = 1024
    rows_of_parameter = nbytes // 2 // columns
    tokens = torch.arange(8)

    def train(link: Link, max_message_bytes: int | None) -> dict[str, float]:
        transport = Simulated(FEW_RANKS, link)
        with torch.no_grad():
            model: Any = OneParameter(rows_of_parameter, columns)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        fully_shard(
            model, transport=transport, mp_policy=policy, max_message_bytes=max_message_bytes
        )
        model(tokens).float().sum().backward()
        impl = model._fsdp_ext_unit.root.impl
        seconds = phases(model, tokens, repeats)
        row = {name: statistics.median(values) for name, values in seconds.items()}
        memory = impl.memory()
        return row | {"buffers": memory["staging_bytes"] + memory["reduce_bytes"]}

    copies = train(NO_TIME, None)
    slowest = max(copies["gather copies"], copies["reduce copies"])
    link = Link("as slow as the copies", alpha=LINK.alpha, beta=nbytes / slowest)
    before = None  # seconds of the copies when the unit is sent whole
    for most in messages:
        row = train(link, most)
        exposed = row["gather copies"] + row["reduce copies"]
        before = before or exposed
        yield {
            "unit_mb": nbytes / MB,
            "message_mb": None if most is None else most / MB,
            "link": f"simulated: {link.alpha * 1e6:.0f} us, {link.beta / 1e9:.2f} GB/s",
            **{
                f"simulated_{name.replace(' ', '_')}_ms": row[name] * 1e3
                for name in row
                if name != "buffers"
            },
            "buffers_mb": row["buffers"] / MB,
            "simulated_hidden": 1 - exposed / before,
        }


def show_cut(rows: Sequence[dict[str, Any]]) -> None:
    """Print the second part."""
    first = rows[0]
    print(f"one unit of {first['unit_mb']:.0f} MB in bf16, {first['link']}")
    header = ["message MB", "simulated gather ms", "its copies", "simulated reduction ms"]
    header += ["its copies", "of copies hidden", "buffers MB"]
    print_table(
        header,
        [
            [
                "whole" if row["message_mb"] is None else f"{row['message_mb']:.0f}",
                f"{row['simulated_gather_ms']:.0f}",
                f"{row['simulated_gather_copies_ms']:.0f}",
                f"{row['simulated_reduce_ms']:.0f}",
                f"{row['simulated_reduce_copies_ms']:.0f}",
                f"{row['simulated_hidden']:.0%}",
                f"{row['buffers_mb']:.0f}",
            ]
            for row in rows
        ],
    )


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure both parts; --quick: two shapes, few sizes and repeats, a small unit."""
    warnings.filterwarnings("ignore", message="fsdp_ext: .*simulated")  # the tables say it
    repeats = 6 if args.quick else 30
    sizes = [0, 8 * MB, None] if args.quick else [*BUCKETS, None]
    for shape in SHAPES[:2] if args.quick else SHAPES:
        for nbytes in sizes:
            keep(measure_buckets(shape, nbytes, repeats))
    unit = 32 * MB if args.quick else 512 * MB
    messages = [None, *(unit // pieces for pieces in ((8,) if args.quick else (4, 8, 16, 32, 64)))]
    for row in measure_cut(unit, messages, 4 if args.quick else 8):
        keep(row)


def by_shape(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the first part for each shape."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "shape" in row:
            found.setdefault(row["shape"], []).append(row)
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the tables of both parts."""
    for shape, of_shape in by_shape(rows).items():
        show_buckets(shape, of_shape)
        print()
    cut = [row for row in rows if "unit_mb" in row]
    if cut:
        show_cut(cut)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw wire time and step time over the bucket size, with the predictions."""
    title = f"link {LINK.name}, {SIMULATED_RANKS} ranks (simulated)"
    columns = {"communication": "wire", "step": "step"}
    with picture(path, title, columns=2) as all_axes:
        for axes, (column, what) in zip(all_axes, columns.items(), strict=True):
            for i, (shape, of_shape) in enumerate(by_shape(rows).items()):
                # The default repeats one of the other sizes.
                asked = [row for row in of_shape if not row["is_default"]]
                ordered = sorted(asked, key=lambda row: row["bucket_bytes"])
                sizes = [row["bucket_bytes"] / MB for row in ordered]
                measured = [row[f"simulated_{column}_ms"] for row in ordered]
                predicted = [row[f"predicted_{column}_ms"] for row in ordered]
                axes.plot(sizes, measured, f"C{i}o-", label=shape)
                axes.plot(sizes, predicted, f"C{i}--", label=f"{shape}, predicted")
            # The size 0, each unit by itself, is on a linear part of the axis.
            axes.set_xscale("symlog", linthresh=1)
            axes.set(xlabel="bucket, MB", ylabel=f"simulated {what} of a step, ms", yscale="log")
            axes.legend(fontsize="small")
