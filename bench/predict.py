"""How well is a step predicted before it runs, over real transports, of models not fitted to?

Two ranks (or --ranks N), each bound to a core, over each transport of the host. One model, a
transformer, is fitted to: it trains with buckets of several sizes, and the ledger of its steps says
what collectives take in a step, where compute wants the same cores, alpha + S / beta, and what
packing costs a byte. The contention of fsdp_ext.schedule.predict, what compute loses beside them,
is what predicts its own steps best; where all of it does not do, since ranks that share cores with
compute wait for each other, collectives are "held" so many times as long.

Other models are predicted by fsdp_ext.plan: their compute is what their unsharded replicas take on
all ranks at once, shared out among units by floating-point operations. A step is forward and
backward; unsharded and sharded ones take turns, and the slowest rank counts. Each model is made
three times over, since where memory lies changes how long it takes.

"off" is predicted / measured - 1, which is to be within 10%. The fit model's own is what the fit
leaves.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ext
from bench import ranks
from bench.harness import Keep
from bench.output import bars, picture, print_table
from bench.training import GPT, Block, GPTConfig
from fsdp_ext import fully_shard
from fsdp_ext.ledger import WIRES, copy_rates
from fsdp_ext.measure_link import OPERATIONS, Sample, fit, link_of
from fsdp_ext.simulated import Link

RANKS = 2
DEVICES = ("cpu",)
TRANSPORTS = ("shared_memory", "process_group")
WARMUP = 4
FITTED = "GPT, the fit model"
# Contention from which on all of compute counts as lost, and how long collectives may be held.
ALL_OF_IT, MOST_HELD = 0.99, 4.0
BOUND = 0.10  # that predictions are to be off by at most
REPLICAS = 3
# Buckets that the fit model trains with, for collectives of one block, of two and of four.
FIT_BUCKET_BYTES = (None, 7 * 10**6, 13 * 10**6)


class Stack(nn.Sequential):
    """Layers of one size."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)))


class Pyramid(nn.Sequential):
    """Layers whose size changes, with wide ones in the middle."""

    def __init__(self, dims: list[int]) -> None:
        pairs = itertools.pairwise(dims)
        super().__init__(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))


@dataclass(frozen=True)
class Case:
    """A model, and what it is called with."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    units: type[nn.Module]


def gpt(dim: int, layers: int, tokens: int) -> tuple[Callable[[], nn.Module], Callable[[], Tensor]]:
    """Return a transformer and its tokens."""
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
    """Forward and backward of one model, timed."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model: Any = model
        self.batch = batch
        self.forward: list[float] = []
        self.backward: list[float] = []

    def run(self, keep: bool = True) -> None:
        """Run one, all ranks at once; all gradients are new."""
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
    """What one model took."""

    compute: tuple[float, float]  # unsharded, forward and backward
    step: float  # sharded
    copies: tuple[float, float]  # seconds a byte around gathers and reductions
    collectives: list[Sample]  # in steps


def slowest(steps: list[Step]) -> tuple[float, float, float]:
    """Return the medians of forward, of backward and of both, of the slowest rank in each step."""
    forward = [seconds for step in steps for seconds in step.forward]
    backward = [seconds for step in steps for seconds in step.backward]
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    taken = torch.tensor([forward, backward, both], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    medians = taken.median(dim=1).values.tolist()
    return medians[0], medians[1], medians[2]


def run_model(
    case: Case, transport: str, repeats: int, replicas: int, bucket_bytes: int | None = None
) -> Measured:
    """Train a model unsharded and sharded, in turns."""
    torch.manual_seed(0)
    batch = case.batch()
    plain = [Step(case.make(), batch) for _ in range(replicas)]
    sharded = [Step(case.make(), batch) for _ in range(replicas)]
    for step in sharded:
        for module in list(step.model.modules())[::-1]:
            if isinstance(module, case.units) and module is not step.model:
                fully_shard(module, transport=transport)
        fully_shard(step.model, transport=transport, bucket_bytes=bucket_bytes)
    for number in range(WARMUP + repeats):
        for pair in zip(plain, sharded, strict=True):
            for step in pair:
                step.run(keep=number >= WARMUP)
    profiles = []
    for step in sharded:
        with fsdp_ext.profile(step.model) as prof:
            for _ in range(repeats):
                step.run(keep=False)
        profiles.append(prof.merge())
    forward, backward, _ = slowest(plain)
    return Measured(
        (forward, backward),
        slowest(sharded)[2],
        copy_rates([iteration for prof in profiles for iteration in prof.iterations]),
        collectives_of(profiles),
    )


def collectives_of(profiles: list[fsdp_ext.profile]) -> list[Sample]:
    """Return what collectives of each size took: the mean in a step, which is what adds up in it.

    The median over steps; and of each collective the rank counts that came last, which waits for
    nobody.
    """
    means: dict[tuple[str, int], list[float]] = {}
    for iterations in (
        each for prof in profiles for each in zip(*prof.ranks.values(), strict=True)
    ):
        taken: dict[tuple[str, int], list[float]] = {}
        for lane, operation in zip(WIRES, OPERATIONS, strict=True):
            for spans in zip(*(iteration.of(lane) for iteration in iterations), strict=True):
                key = (operation, spans[0].nbytes)
                taken.setdefault(key, []).append(min(span.seconds for span in spans))
        for key, seconds in taken.items():
            means.setdefault(key, []).append(statistics.mean(seconds))
    return [Sample(*key, statistics.median(each)) for key, each in means.items()]


def link_in_steps(transport: str, measured: list[Measured]) -> Link:
    """Fit alpha + S / beta to what collectives took in steps."""
    samples = [sample for one in measured for sample in one.collectives]
    fits = (fit([s for s in samples if s.operation == name]) for name in OPERATIONS)
    return link_of(f"{transport}, in steps", *fits)


@dataclass(frozen=True)
class Model:
    """What is told of a model to predict it."""

    case: Case
    transport: str
    bucket_bytes: int | None
    compute: dict[str, tuple[float, float]]  # seconds of each unit's forward and backward

    def plan(self, **times: Any) -> fsdp_ext.Plan:
        """Return its plan, with a prediction."""
        with torch.device("meta"):
            model = self.case.make()
        return fsdp_ext.plan(
            model,
            dist.get_world_size(),
            units=self.case.units,
            transport=self.transport,
            device_type="cpu",
            bucket_bytes=self.bucket_bytes,
            **times,
        )


def model_of(
    case: Case, transport: str, measured: Measured, bucket_bytes: int | None = None
) -> Model:
    """Share a model's compute out among its units, by their floating-point operations."""
    unknown = Model(case, transport, bucket_bytes, {})
    flops = {unit.name: unit.flops or (0, 0) for unit in unknown.plan(batch=case.batch()).units}
    totals = [max(sum(of[i] for of in flops.values()), 1) for i in (0, 1)]
    compute = {
        name: (measured.compute[0] * of[0] / totals[0], measured.compute[1] * of[1] / totals[1])
        for name, of in flops.items()
    }
    return Model(case, transport, bucket_bytes, compute)


@dataclass(frozen=True)
class Fitted:
    """What the fit model has told."""

    link: Link
    copies: tuple[float, float]
    contention: float
    held: float  # how many times as long collectives take for waits on ranks that come late

    def predict(self, model: Model) -> fsdp_ext.Plan:
        """Return the plan of a model, with its prediction."""
        (alpha, beta), (reduce_alpha, reduce_beta) = self.link.costs()
        link = Link(
            self.link.name,
            alpha=alpha * self.held,
            beta=beta / self.held,
            reduce_alpha=reduce_alpha * self.held,
            reduce_beta=reduce_beta / self.held,
        )
        return model.plan(
            link=link, compute=model.compute, contention=self.contention, copies=self.copies
        )


def step_of(plan: fsdp_ext.Plan) -> float:
    """Return the predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.step


def least(badness: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum between ``low`` and ``high`` has it."""
    for _ in range(12):
        third = (high - low) / 3
        if badness(low + third) < badness(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def fit_to(case: Case, transport: str, repeats: int, replicas: int) -> tuple[Measured, Fitted]:
    """Return what the fit model took with the default buckets, and all that it tells."""
    found = [run_model(case, transport, repeats, replicas, size) for size in FIT_BUCKET_BYTES]
    link = link_in_steps(transport, found)
    copies = found[0].copies
    models = [
        model_of(case, transport, of_size, size)
        for of_size, size in zip(found, FIT_BUCKET_BYTES, strict=True)
    ]

    def badness(contention: float, held: float = 1.0) -> float:
        fitted = Fitted(link, copies, contention, held)
        return sum(
            (step_of(fitted.predict(model)) / of_size.step - 1) ** 2
            for model, of_size in zip(models, found, strict=True)
        )

    # A step grows with either, so there is one best one.
    contention = least(badness, 0.0, 1.0)
    held = 1.0
    if contention > ALL_OF_IT:
        contention = 1.0
        held = least(lambda times: badness(1.0, times), 1.0, MOST_HELD)
    return found[0], Fitted(link, copies, contention, held)


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Fit to one model and predict the others, over each transport."""
    ranks.join(args.device)
    repeats, replicas = (4, 1) if args.quick else (16, REPLICAS)
    for transport in TRANSPORTS:
        fit_model, *others = CASES
        measured, fitted = fit_to(fit_model, transport, repeats, replicas)
        keep(row_of(fit_model, transport, measured, fitted))
        for case in others:
            measured = run_model(case, transport, repeats, replicas)
            keep(row_of(case, transport, measured, fitted))


def row_of(case: Case, transport: str, measured: Measured, fitted: Fitted) -> dict[str, Any]:
    """Return what is kept of one model."""
    plan = fitted.predict(model_of(case, transport, measured))
    assert plan.prediction is not None
    (alpha, beta), (reduce_alpha, reduce_beta) = fitted.link.costs()
    return {
        "model": case.name,
        "transport": transport,
        "ranks": dist.get_world_size(),
        "fitted": case.name == FITTED,
        "parameters": sum(unit.parameters for unit in plan.units),
        "buckets": len(plan.buckets),
        "compute_ms": sum(measured.compute) * 1e3,
        "step_ms": measured.step * 1e3,
        "predicted_ms": plan.prediction.step * 1e3,
        "predicted_exposed_ms": plan.prediction.exposed * 1e3,
        "off": plan.prediction.step / measured.step - 1,
        "contention": fitted.contention,
        "held": fitted.held,
        "copies_ns_a_byte": [rate * 1e9 for rate in fitted.copies],
        "link": {
            "alpha_us": alpha * 1e6,
            "beta_gb_s": beta / 1e9,
            "reduce_alpha_us": reduce_alpha * 1e6,
            "reduce_beta_gb_s": reduce_beta / 1e9,
        },
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table for each transport."""
    header = ["model", "parameters M", "buckets", "compute ms", "step ms", "predicted ms", "off"]
    for transport in TRANSPORTS:
        mine = [row for row in rows if row["transport"] == transport]
        if not mine:
            continue
        link = mine[0]["link"]
        print(
            f"\n{transport}, {mine[0]['ranks']} ranks, in steps: gathers {link['alpha_us']:.0f} us "
            f"+ S / {link['beta_gb_s']:.2f} GB/s, reductions {link['reduce_alpha_us']:.0f} us "
            f"+ S / {link['reduce_beta_gb_s']:.2f} GB/s; contention {mine[0]['contention']:.2f}, "
            f"held {mine[0]['held']:.2f} times as long"
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
                    f"{row['off']:+.1%}{', fitted' if row['fitted'] else ''}",
                ]
                for row in mine
            ],
        )
        if not all(row["fitted"] for row in mine):
            print(within(mine))


def within(rows: list[dict[str, Any]]) -> str:
    """Return how many predictions keep to the bound, and by how much the worst one does or not.

    The fit model, whose own prediction is none, does not count.
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
    """Draw how far off each prediction is."""
    others = [row for row in rows if not row["fitted"]]
    with picture(path, "predicted step beside the measured one") as axes:
        names = [f"{row['model']},\n{row['transport']}" for row in others]
        off_by = [abs(row["off"]) * 100 for row in others]
        bars(axes, names, off_by, "% off", groups=[row["transport"] for row in others])
