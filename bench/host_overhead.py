"""How much host time does sharding add to a step, for each unit?

Host overhead is the time of a sharded iteration (forward and backward), minus the time of an
unsharded iteration right before it, divided by the number of units. The table has the median over
repeats and the quartiles. All systems take turns in this process, with one thread. Layers are tiny,
so that their compute does not hide the overhead.

The part "step" is an iteration with clip_grad_norm_, AdamW's step and zero_grad, beside an
unsharded iteration with the same. Ours has the clipping and AdamW of fsdp_ext. FSDP2 and the
unsharded model have PyTorch's, fused. "ours, attached" steps in backward, where it would clip by
the norm of the step before, so no system of its part, "step, not clipped", clips.

On the CPU the process group is "fake": collectives take no time and move no data, so only the
host's work is left. On a GPU it is NCCL with one rank. There the benchmark times the host alone,
which issues an iteration to an idle GPU.

The line "ledger" gives the cost of fsdp_ext.profile for each unit while it records, and the line
"flight record" the cost of recording the newest collectives, which is always on. This does not
depend on the unit's parameters. It is measured on units of two parameters, whose steps are short
enough to show it, and compared with the overhead of such a unit and of a unit of 16 parameters. A
figure whose quartiles include zero is shown as "not distinguishable from zero". --quick leaves out
the units of 400 parameters, and measures records less often.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.harness.timing import INDISTINCT, Timing, as_microseconds, includes_zero

WORLD_SIZE = 8
UNITS = 24
LAYERS = 8  # of a unit, where the size of units does not change
WIDTH = 8
BATCH = 2
LEARNING_RATE = 1e-4
MAX_NORM = 1.0
RECORD_LAYERS, RECORD_UNITS = 1, 96  # of the model that measures records: layers a unit, units
KEPT = 64  # iterations that the ledger keeps, as fsdp_ext.profile does by default
BLOCK = 20  # iterations of a block that count, after KEPT that do not


def make_model(layers: int, units: int) -> nn.Sequential:
    """Return `units` sequences of `layers` linear layers each."""
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(units))
    )


def shard_ours(model: nn.Sequential, buckets: int | None = None) -> nn.Module:
    """Shard each sequence and the whole with fsdp_ext; None: each unit is a bucket by itself."""
    from fsdp_ext import fully_shard

    sharded: list[Any] = [fully_shard(unit) for unit in model]
    layout = sharded[0]._fsdp_ext_unit.layout_for(training=True)
    units = len(sharded) // buckets if buckets else 0
    fully_shard(model, bucket_bytes=units * layout.gather_bytes * layout.world_size)
    return model


def shard_fsdp2(model: nn.Sequential) -> nn.Module:
    """Shard each sequence and the whole with PyTorch's FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    return model


def shard_fsdp1(model: nn.Sequential) -> nn.Module:
    """Wrap each sequence and the whole with PyTorch's FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = partial(
        FullyShardedDataParallel, device_id=next(model.parameters()).device, use_orig_params=True
    )
    return wrap(nn.Sequential(*(wrap(unit) for unit in model)))


SYSTEMS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ours": shard_ours,
    "ours, two buckets": partial(shard_ours, buckets=2),
    "FSDP2": shard_fsdp2,
    "FSDP1": shard_fsdp1,
}


ATTACHED = "ours, attached"
ITERATION = "iteration"
STEP = "step"
UNCLIPPED = "step, not clipped"
PARTS: dict[str, dict[str, Callable[[nn.Sequential], nn.Module]]] = {
    ITERATION: SYSTEMS,
    STEP: {"ours": shard_ours, "FSDP2": shard_fsdp2},
    UNCLIPPED: {"ours": shard_ours, ATTACHED: shard_ours, "FSDP2": shard_fsdp2},
}


def nothing() -> None:
    """Update no parameter."""


def update_of(name: str, model: nn.Module, part: str) -> Callable[[], None]:
    """Return what a system does after backward, in an iteration of a part in `PARTS`."""
    if part == ITERATION:
        return nothing
    from fsdp_ext import clip_grad_norm_, optim

    clip: Any = nn.utils.clip_grad_norm_
    optimizer: Any
    if name in ("ours", ATTACHED):
        clip = clip_grad_norm_
        optimizer = optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if name == ATTACHED:
        optimizer.attach(model)

    def update() -> None:
        if part == STEP:
            clip(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def timed(model: nn.Module, batch: torch.Tensor, update: Callable[[], None] = nothing) -> float:
    """Run one iteration; return the seconds of forward, backward and update on the host."""
    start = time.perf_counter()
    model(batch).sum().backward()
    update()
    taken = time.perf_counter() - start
    model.zero_grad()  # otherwise the next iteration would accumulate gradients
    if batch.device.type == "cuda":
        torch.cuda.synchronize()
    return taken


def build_systems(
    part: str, layers: int, units: int, batch: torch.Tensor
) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """Return timed iterations by system, and the errors of systems that cannot run here."""
    iterations: dict[str, Callable[[], float]] = {}
    errors = {}
    for name, shard in PARTS[part].items():
        try:
            model = shard(make_model(layers, units).to(batch.device))
            iteration = partial(timed, model, batch, update_of(name, model, part))
            iteration()
            iterations[name] = iteration
        except Exception as error:  # a system that cannot run here is listed with its error
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()
    return iterations, errors


def measure_size(
    layers: int, units: int, repeats: int, device: torch.device, part: str = ITERATION
) -> list[dict[str, Any]]:
    """Return a row for each system: its overhead a unit, and the ratio to FSDP2's."""
    batch = torch.randn(BATCH, WIDTH, device=device)
    model = make_model(layers, units).to(device)
    unsharded = partial(timed, model, batch, update_of("unsharded", model, part))
    iterations, errors = build_systems(part, layers, units, batch)
    for iteration in iterations.values():
        for _ in range(5):
            unsharded()
            iteration()
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in iterations}
    before: dict[str, list[float]] = {name: [] for name in iterations}
    added: dict[str, list[float]] = {name: [] for name in iterations}
    for _ in range(repeats):
        for name in order.sample(list(iterations), len(iterations)):
            # An unsharded iteration before each one leaves the same caches to all systems.
            before[name].append(unsharded())
            seconds[name].append(iterations[name]())
            added[name].append((seconds[name][-1] - before[name][-1]) / units)
    overhead = {name: Timing.of(times) for name, times in added.items()}
    rows = []
    for name in PARTS[part]:
        row: dict[str, Any] = {"system": name, "part": part}
        row |= {"parameters_per_unit": 2 * layers, "units": units, "device": device.type}
        if name in errors:
            rows.append({**row, "error": errors[name]})
            continue
        row["overhead_us"] = as_microseconds(overhead[name])
        row["iteration_us"] = as_microseconds(Timing.of(seconds[name]))
        row["unsharded_us"] = as_microseconds(Timing.of(before[name]))
        if "FSDP2" in overhead:
            row["ratio_to_fsdp2"] = overhead[name].median / overhead["FSDP2"].median
        rows.append(row)
    return rows


def keep_ledger(model: Any, on: bool) -> None:
    """Record times as fsdp_ext.profile does, or do not."""
    model._fsdp_ext_unit.root.impl.keep_times(KEPT if on else 0)


def keep_flights(model: Any, on: bool) -> None:
    """Record collectives for flight records, or do not."""
    model._fsdp_ext_unit.root.lanes.flights.turn(on)


RECORDS: dict[str, Callable[[Any, bool], None]] = {
    "ledger": keep_ledger,
    "flight record": keep_flights,
}


def measure_record(
    record: str, repeats: int, overhead_us: float, device: torch.device
) -> dict[str, Any]:
    """Return the host overhead that a record adds to a unit.

    Blocks of iterations with and without the record take turns on one model. A pair of blocks gives
    one difference, that of their first quartiles, since other load on the machine changes these
    least. The first iterations of each block allocate buffers and fill caches, and do not count.

    Args:
        record: one of `RECORDS`.
        repeats: pairs of blocks.
        overhead_us: the overhead of a unit of 16 parameters, in microseconds, for the ratio.
        device: the model's device.
    """
    batch = torch.randn(BATCH, WIDTH, device=device)
    unsharded = make_model(RECORD_LAYERS, RECORD_UNITS).to(device)
    sharded: Any = shard_ours(make_model(RECORD_LAYERS, RECORD_UNITS).to(device))

    def block(model: nn.Module) -> float:
        seconds = [timed(model, batch) for _ in range(KEPT + BLOCK)]
        return Timing.of(seconds[KEPT:]).low / RECORD_UNITS

    block(sharded)
    keep_flights(sharded, False)  # the ledger's figures are of the ledger alone
    switch = RECORDS[record]
    order = random.Random(0)
    added, own = [], []
    for _ in range(repeats):
        found = {}
        for on in order.sample([False, True], 2):
            switch(sharded, on)
            found[on] = block(sharded)
        added.append(found[True] - found[False])
        own.append(found[False] - block(unsharded))
    keep_ledger(sharded, False)
    keep_flights(sharded, True)
    timing = Timing.of(added)
    own_us = statistics.median(own) * 1e6
    return {
        "system": f"ours, {record}",
        "parameters_per_unit": 2 * RECORD_LAYERS,
        "units": RECORD_UNITS,
        "device": device.type,
        "added_us": as_microseconds(timing),
        "added_standard_error_us": statistics.stdev(added) / math.sqrt(len(added)) * 1e6,
        "overhead_us_without": own_us,
        "of_overhead": timing.median * 1e6 / own_us,
        "overhead_us_of_16_parameters": overhead_us,
        "of_overhead_of_16_parameters": timing.median * 1e6 / overhead_us,
    }


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure many small units, fewer units with more parameters each, and the records."""
    device = torch.device(args.device)
    if device.type == "cuda":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    repeats = 12 if args.quick else 60
    several = 2 * repeats  # the compute of larger units varies more, so they need more repeats
    sizes = [(LAYERS, UNITS, 4 * repeats), (50, 6, several), (200, 6, several)]
    pairs = 40  # of blocks, each of which takes more than a second
    if args.quick:  # on an H100, all of it would take more than five minutes
        sizes, pairs = sizes[:2], repeats // 2
    without: dict[str, float] = {}
    for layers, units, count in sizes:
        for row in measure_size(layers, units, count, device):
            if "overhead_us" in row:
                without.setdefault(row["system"], row["overhead_us"]["median"])
            keep(row)
    for part in (STEP, UNCLIPPED):
        for row in measure_size(LAYERS, UNITS, 2 * repeats, device, part):
            keep(row)
    if "ours" in without:
        for record in RECORDS:
            keep(measure_record(record, pairs, without["ours"], device))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = []
    for row in rows:
        if "added_us" in row:
            continue
        if "error" in row:
            table.append([*of_what(row), row["error"], *[""] * 4])
            continue
        table.append([*of_what(row), *cells_of(row)])
    on_gpu = rows[0]["device"] == "cuda"
    group = "NCCL with one rank" if on_gpu else f"fake process group of {WORLD_SIZE}"
    print(f"host overhead, {group}, host time alone, one thread")
    headers = ["part", "system", "parameters/unit", "us/unit", "quartiles", "of FSDP2"]
    print_table([*headers, "us/iteration", "unsharded"], table)
    for row in rows:
        if "added_us" in row:
            print(record_line(row))


def of_what(row: dict[str, Any]) -> list[str]:
    """Return what was measured."""
    return [row["part"], row["system"], str(row["parameters_per_unit"])]


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a system's overhead, its quartiles, its ratio to FSDP2's, and whole iterations."""
    overhead, ratio = row["overhead_us"], row.get("ratio_to_fsdp2")
    quartiles = f"{overhead['low']:,.0f} to {overhead['high']:,.0f}"
    whole = [f"{row[name]['median']:,.0f}" for name in ("iteration_us", "unsharded_us")]
    if includes_zero(overhead):
        return [INDISTINCT, quartiles, "", *whole]
    times = "" if ratio is None or ratio < 0 else f"{ratio:.2f}"
    if ratio is not None and 0 < ratio < 0.5:
        times = f"1/{1 / ratio:.0f}"
    return [f"{overhead['median']:,.0f}", quartiles, times, *whole]


def record_line(row: dict[str, Any]) -> str:
    """Return what a record adds to a unit, in a sentence."""
    added = row["added_us"]
    quartiles = f"quartiles of pairs {added['low']:.2f} to {added['high']:.2f} us"
    if includes_zero(added):
        return f"{row['system']}: what it adds to a unit is {INDISTINCT} ({quartiles})"
    return (
        f"{row['system']}: adds {added['median']:.2f} us to a unit ({quartiles}): "
        f"{row['of_overhead_of_16_parameters']:.1%} of the "
        f"{row['overhead_us_of_16_parameters']:.1f} us of a unit of 16 parameters, "
        f"{row['of_overhead']:.1%} of the {row['overhead_us_without']:.1f} us of a unit of 2"
    )


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: ours could not run."""
    failed = [row["error"] for row in rows if row["system"] == "ours" and "error" in row]
    return f"ours failed: {failed[0]}" if failed else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the overhead of a unit over the number of its parameters."""
    points: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in rows:
        if row.get("part") == ITERATION and "overhead_us" in row:
            us = row["overhead_us"]
            point = (row["parameters_per_unit"], us["median"], us["low"], us["high"])
            points.setdefault(row["system"], []).append(point)
    with picture(path, "host time that sharding adds") as axes:
        for name, line in points.items():
            parameters, medians, low, high = zip(*line, strict=True)
            axes.plot(parameters, medians, marker="o", label=name)
            axes.fill_between(parameters, low, high, alpha=0.2)
        # A figure within the noise may be negative, which a plain logarithm cannot show.
        axes.set_yscale("symlog", linthresh=10)
        axes.set(xlabel="parameters in a unit", ylabel="us a unit")
        axes.legend()
