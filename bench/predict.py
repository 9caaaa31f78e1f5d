"""How well does fsdp_ext.plan predict the step time of a model that it was not fitted to?

Two ranks (or --ranks N), each bound to a core, train over each transport of the host, or (--hosts
2, --rate 4gbit) between two hosts, as `python -m bench overlap --help` describes. First, the
cost of a collective by itself is measured, alpha + S / beta (python -m fsdp_ext measure-link).

Then a transformer, the fit model, trains. The ledger of its steps gives two more costs: how many
times as long collectives take within a step, where compute needs the same cores ("in steps"), and
the cost of packing a byte. The contention of planner.schedule.predict is set so that the fit
model's own step is predicted correctly.

Finally, fsdp_ext.plan predicts the other models. Their compute time is that of unsharded replicas
on all ranks at once, divided among units by floating-point operations. A step is forward and
backward. Unsharded and sharded steps take turns, and the slowest rank counts. Each model is built
three times, because the place of its memory changes its speed.

"off" is predicted / measured - 1; the goal is 10%. For the fit model it is zero by construction, or
the error that remains if no contention fits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ext
from bench.harness import ranks
from bench.harness.output import bars, picture, print_table
from bench.harness.runner import Keep
from bench.models.training import GPT, Block, GPTConfig
from fsdp_ext import fully_shard
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.link import Link, fit
from fsdp_ext.comm.measure_link import OPERATIONS
from fsdp_ext.comm.measure_link import measure as measure_link
from fsdp_ext.profiler.recording import Iteration, copy_rates, wire_seconds

RANKS = 2
HOSTS = 2
DEVICES = ("cpu",)
TRANSPORTS = ("shared_memory", "process_group")
BETWEEN_HOSTS = ("process_group",)
WARMUP = 4
FITTED = "GPT, the fit model"
BOUND = 0.10  # the largest error that predictions should have
FITS = 0.005  # the largest error of a successful fit
REPLICAS = 3


class Stack(nn.Sequential):
    """Layers of equal size."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)))


class Pyramid(nn.Sequential):
    """Layers of different sizes, the widest in the middle."""

    def __init__(self, dims: list[int]) -> None:
        pairs = itertools.pairwise(dims)
        super().__init__(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))


@dataclass(frozen=True)
class Case:
    """A model, its input, and the class of its units."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    units: type[nn.Module]


def gpt(dim: int, layers: int, tokens: int) -> tuple[Callable[[], nn.Module], Callable[[], Tensor]]:
    """Return functions that make a transformer and its tokens."""
    config = GPTConfig(vocabulary=512, context=tokens, dim=dim, layers=layers, heads=4)
    return (lambda: GPT(config)), (lambda: torch.randint(512, (1, tokens)))


CASES = [
    Case(FITTED, *gpt(256, 8, 64), Block),
    Case("GPT of half as many, wider blocks", *gpt(384, 4, 128), Block),
    Case("stack of 16 layers", lambda: Stack(16, 512), lambda: torch.randn(96, 512), nn.Sequential),
    Case(
        "pyramid",
        lambda: Pyramid([256, 512, 1024, 1536, 1024, 512, 256]),
        lambda: torch.randn(128, 256),
        nn.Sequential,
    ),
]


class Step:
    """Runs forward and backward of one model, and times them."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model: Any = model
        self.batch = batch
        self.forward: list[float] = []
        self.backward: list[float] = []

    def run(self, keep: bool = True) -> None:
        """Run one step on all ranks at once, without gradients of the previous step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(self.batch).float().square().mean()
        middle = time.perf_counter()
        loss.backward()
        if keep:
            self.forward.append(middle - start)
            self.backward.append(time.perf_counter() - middle)


@dataclass(frozen=True)
class Measured:
    """The times of one model."""

    compute: tuple[float, float]  # unsharded, forward and backward
    step: float  # sharded
    copies: tuple[float, float]  # seconds a byte of the copies of gathers and of reductions
    in_steps: tuple[float, float]  # time of gathers and of reductions, relative to the link's


def run_model(case: Case, transport: str, link: Link, repeats: int, replicas: int) -> Measured:
    """Train a model unsharded and sharded, in turns; return its times."""
    torch.manual_seed(0)
    batch = case.batch()
    plain = [Step(case.make(), batch) for _ in range(replicas)]
    sharded = [Step(case.make(), batch) for _ in range(replicas)]
    for step in sharded:
        for module in list(step.model.modules())[::-1]:
            if isinstance(module, case.units) and module is not step.model:
                fully_shard(module, transport=transport)
        fully_shard(step.model, transport=transport)
    for number in range(WARMUP + repeats):
        for pair in zip(plain, sharded, strict=True):
            for step in pair:
                step.run(keep=number >= WARMUP)
    steps = []
    for step in sharded:
        with fsdp_ext.profile(step.model) as prof:
            for _ in range(repeats):
                step.run(keep=False)
        steps += list(zip(*prof.merge().ranks.values(), strict=True))
    forward, backward, _ = slowest(plain)
    return Measured(
        compute=(forward, backward),
        step=slowest(sharded)[2],
        copies=copy_rates([of_ranks[dist.get_rank()] for of_ranks in steps]),
        in_steps=in_steps_of(steps, link),
    )


def slowest(steps: list[Step]) -> tuple[float, float, float]:
    """Return the median seconds of forward, backward and both, on the slowest rank of each step."""
    forward = [seconds for step in steps for seconds in step.forward]
    backward = [seconds for step in steps for seconds in step.backward]
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    taken = torch.tensor([forward, backward, both], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    medians = [statistics.median(seconds) for seconds in taken.tolist()]
    return medians[0], medians[1], medians[2]


def in_steps_of(steps: list[tuple[Iteration, ...]], link: Link) -> tuple[float, float]:
    """Return the time of gathers and of reductions in a step, relative to the link's.

    For each collective, the rank that came last counts, because it does not wait for others.

    Args:
        steps: the times of all ranks, for each step.
        link: the cost of a collective by itself.
    """
    found = []
    for lane, operation in zip(("gather", "reduce"), OPERATIONS, strict=True):
        ratios = []
        for iterations in steps:
            of_ranks = [wire_seconds(iteration, lane, link.one_wire) for iteration in iterations]
            taken = sum(map(min, zip(*of_ranks, strict=True)))
            alone = sum(link.seconds(operation, span.nbytes) for span in iterations[0].of(lane))
            ratios.append(taken / alone)
        found.append(statistics.median(ratios))
    return found[0], found[1]


def as_in_steps(link: Link, times: tuple[float, float]) -> Link:
    """Return a link whose gathers and reductions take `times` as long."""
    (alpha, beta), (reduce_alpha, reduce_beta) = link.costs()
    return replace(
        link,
        name=f"{link.name}, in steps",
        alpha=alpha * times[0],
        beta=beta / times[0],
        reduce_alpha=reduce_alpha * times[1],
        reduce_beta=reduce_beta / times[1],
    )


def measured_link(transport: str, repeats: int) -> Link:
    """Measure the cost of a transport's collectives by themselves."""
    assert dist.group.WORLD is not None
    device = torch.device("cpu")
    samples = measure_link(lanes_of(dist.group.WORLD, device, transport), device, repeats)
    gather, reduce = (fit([s for s in samples if s.operation == name]) for name in OPERATIONS)
    name = f"{transport}, measured"
    return Link(name, gather.alpha, gather.beta, reduce.alpha, reduce.beta)


def predicted(
    case: Case,
    transport: str,
    measured: Measured,
    link: Link,
    copies: tuple[float, float],
    contention: float,
) -> fsdp_ext.Plan:
    """Return the plan of a model, which has the prediction."""
    with torch.device("meta"):
        model = case.make()
    common: dict[str, Any] = {"units": case.units, "transport": transport, "device_type": "cpu"}
    size = dist.get_world_size()
    counted = fsdp_ext.plan(model, size, batch=case.batch(), **common)
    flops = {unit.name: unit.flops or (0, 0) for unit in counted.units}
    totals = [max(sum(of[i] for of in flops.values()), 1) for i in (0, 1)]
    compute = {
        name: (measured.compute[0] * of[0] / totals[0], measured.compute[1] * of[1] / totals[1])
        for name, of in flops.items()
    }
    return fsdp_ext.plan(
        model,
        size,
        link=link,
        compute=compute,
        contention=contention,
        copies=copies,
        **common,
    )


def step_of(plan: fsdp_ext.Plan) -> float:
    """Return the predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.step


def fit_contention(predict: Callable[[float], float], measured: float) -> float:
    """Return the contention, 0 to 1, for which the prediction equals the measured time."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if predict(middle) < measured:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Fit to one model and predict the others, over each transport."""
    ranks.join(args.device)
    if args.hosts == 1:
        for transport in TRANSPORTS:
            measure_transport(transport, args.quick, {}, keep)
        return
    for rate in args.rate:
        ranks.set_rate(rate)
        for transport in BETWEEN_HOSTS:
            measure_transport(transport, args.quick, {"rate": rate}, keep)


def measure_transport(transport: str, quick: bool, place: dict[str, Any], keep: Keep) -> None:
    """Fit to one model and predict the others. Rows begin with `place`."""
    repeats, replicas = (6, 1) if quick else (16, REPLICAS)
    link = replace(measured_link(transport, 3 if quick else 10), one_wire="rate" in place)
    contention, copies, used = 0.0, (0.0, 0.0), link
    for case in CASES:
        measured = run_model(case, transport, link, repeats, replicas)
        if case.name == FITTED:
            copies, used = measured.copies, as_in_steps(link, measured.in_steps)
            contention = fit_contention(
                lambda c: step_of(predicted(case, transport, measured, used, copies, c)),  # noqa: B023
                measured.step,
            )
        plan = predicted(case, transport, measured, used, copies, contention)
        costs = {"contention": contention, "copies_ns_a_byte": [rate * 1e9 for rate in copies]}
        common = {"model": case.name, "transport": transport, "fitted": case.name == FITTED}
        keep(place | common | row_of(measured, plan) | costs | {"link": figures_of(link)})


def row_of(measured: Measured, plan: fsdp_ext.Plan) -> dict[str, Any]:
    """Return the measured and the predicted figures of one model."""
    assert plan.prediction is not None
    return {
        "ranks": dist.get_world_size(),
        "parameters": sum(unit.parameters for unit in plan.units),
        "buckets": len(plan.buckets),
        "compute_ms": sum(measured.compute) * 1e3,
        "step_ms": measured.step * 1e3,
        "predicted_ms": plan.prediction.step * 1e3,
        "predicted_exposed_ms": plan.prediction.exposed * 1e3,
        "off": plan.prediction.step / measured.step - 1,
        "in_steps": measured.in_steps,
    }


def figures_of(link: Link) -> dict[str, float]:
    """Return a link's costs in the form of the JSON."""
    (alpha, beta), (reduce_alpha, reduce_beta) = link.costs()
    return {
        "alpha_us": alpha * 1e6,
        "beta_gb_s": beta / 1e9,
        "reduce_alpha_us": reduce_alpha * 1e6,
        "reduce_beta_gb_s": reduce_beta / 1e9,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table for each transport."""
    header = ["model", "parameters M", "buckets", "compute ms", "step ms", "predicted ms", "off"]
    for place, transport in dict.fromkeys((row.get("rate"), row["transport"]) for row in rows):
        mine = [row for row in rows if (row.get("rate"), row["transport"]) == (place, transport)]
        link = mine[0]["link"]
        where = "" if place is None else f" on two hosts, {place}"
        print(
            f"\n{transport}, {mine[0]['ranks']} ranks{where}: gathers {link['alpha_us']:.0f} us "
            f"+ S / {link['beta_gb_s']:.2f} GB/s, reductions {link['reduce_alpha_us']:.0f} us "
            f"+ S / {link['reduce_beta_gb_s']:.2f} GB/s; in steps {mine[0]['in_steps'][0]:.2f} and "
            f"{mine[0]['in_steps'][1]:.2f} times as long; contention {mine[0]['contention']:.2f}"
        )
        print_table(
            header,
            [
                [
                    row["model"],
                    f"{row['parameters'] / 1e6:.1f}",
                    str(row["buckets"]),
                    f"{row['compute_ms']:.1f}",
                    f"{row['step_ms']:.1f}",
                    f"{row['predicted_ms']:.1f}",
                    off(row),
                ]
                for row in mine
            ],
        )
        if not all(row["fitted"] for row in mine):
            print(within(mine))


def off(row: dict[str, Any]) -> str:
    """Return the error of a prediction, as the table shows it."""
    if row["fitted"] and abs(row["off"]) < FITS:
        return "by construction"
    return f"{row['off']:+.1%}{', fitted' if row['fitted'] else ''}"


def within(rows: list[dict[str, Any]]) -> str:
    """Return how many predictions are within the bound, and by how much the worst one is or not.

    The fit model does not count.
    """
    others = [row for row in rows if not row["fitted"]]
    kept = [row for row in others if abs(row["off"]) <= BOUND]
    worst = max(others, key=lambda row: abs(row["off"]))
    left = BOUND - abs(worst["off"])
    return (
        f"{len(kept)} of {len(others)} predictions within {BOUND:.0%}; the farthest is "
        f"{worst['model']}, {worst['off']:+.1%}, {abs(left) * 100:.1f} percentage points "
        f"{'inside' if left >= 0 else 'outside'}"
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the error of each prediction."""
    others = [row for row in rows if not row["fitted"]]
    with picture(path, "error of the predicted step time") as axes:
        places = [row.get("rate", row["transport"]) for row in others]
        names = [f"{row['model']},\n{place}" for row, place in zip(others, places, strict=True)]
        off_by = [abs(row["off"]) * 100 for row in others]
        bars(axes, names, off_by, "% off", groups=places)
