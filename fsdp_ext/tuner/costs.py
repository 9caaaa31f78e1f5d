"""What a model's units compute and what its collectives take, measured in steps of its own."""

# Note [measuring costs]
# Compute is measured where nothing is on the wire beside it: without prefetch a gather is waited
# for before its unit computes, so that forward computes alone. With prefetch, the same unit
# computes beside the next one's gather; what it then takes longer, by what that gather takes alone,
# is the contention that schedule.predict asks for. Backward always has reductions beside it; by the
# contention their part is taken off. Two sizes of buckets give collectives of several sizes, for
# alpha and beta; where memory has no room for the larger ones, units of several sizes may do, and
# else what is typical of the transport is taken.

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_ext.comm.link import Link
from fsdp_ext.comm.measure_link import Fit, Sample, fit, link_of
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.profiler.api import profile
from fsdp_ext.profiler.recording import WIRES, Iteration, copy_rates, own_compute
from fsdp_ext.sharding.agreement import exchange, together
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.unit import Unit

WARMUP = 2
_OPERATIONS = {"gather": "all_gather", "reduce": "reduce_scatter"}


@dataclass(frozen=True)
class Costs:
    """What a step of a model is made of, on the slowest rank.

    Args:
        compute: seconds of each unit's forward and backward, by its number, alone.
        between: seconds from forward's end to backward's begin: the loss.
        link: what collectives take.
        copies: seconds a byte of casts and unpacking around gathers, of packing and handing over
            around reductions; bytes as of the collectives.
        contention: what compute loses of a collective's time beside it, 0 to 1.
    """

    compute: tuple[tuple[float, float], ...]
    between: float
    link: Link
    copies: tuple[float, float]
    contention: float


@dataclass(frozen=True)
class _Figures:
    """Medians of one way to run, of one rank."""

    compute: dict[tuple[str, int], float]
    between: float
    wire: dict[tuple[str, int], float]  # seconds, by operation and bytes
    copies: tuple[float, float]  # seconds a byte: copy_rates


@dataclass(frozen=True)
class Probes:
    """How costs are measured; all of it in the memory that there is.

    Args:
        steps: of each way to run, after a few to warm up.
        merged: bytes of buckets that hold several units, for a second size of collectives; None to
            leave that out.
        ahead: whether to run with a gather ahead, for the contention, which else is 0.
    """

    steps: int
    merged: int | None
    ahead: bool


def measure_costs(
    root: Root, step: Callable[[], object], apply: Callable[[int, int], None], probes: Probes
) -> Costs:
    """Run steps in up to three ways and return what they are made of; all ranks call this.

    Args:
        root: of the model.
        step: runs forward and backward.
        apply: sets bucket_bytes, of all units, and prefetch for the next steps.
        probes: which ways those are.
    """

    def run(bucket_bytes: int, prefetch: int) -> _Figures:
        what = f"steps with bucket_bytes={bucket_bytes:,}, prefetch={prefetch}"
        with together(root.units[0], "tune", what):
            apply(bucket_bytes, prefetch)
            return _run(root, step, probes.steps)

    alone = run(0, 0)
    merged = None if probes.merged is None else run(probes.merged, 0)
    ahead = run(0, 1) if probes.ahead else None
    ranks = exchange(root.units[0], (alone, merged, ahead))
    wire: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for of_rank in ranks:
        for figures in of_rank[:2]:
            for key, seconds in ({} if figures is None else figures.wire).items():
                wire[key].append(seconds)
    # Whoever comes last waits for nobody.
    shortest = {key: min(seconds) for key, seconds in wire.items()}
    sizes = [_wire_bytes(unit) for unit in root.units]
    gathers = [shortest.get(("gather", nbytes), 0.0) for nbytes, _ in sizes]
    reductions = [shortest.get(("reduce", nbytes), 0.0) for _, nbytes in sizes]
    # The root's and the first unit's come before any compute.
    contention = statistics.median(
        _contention(first, last, sum(gathers[2:])) for first, _, last in ranks
    )
    compute = []
    for number in range(len(root.units)):
        forward = max(of.compute.get(("unit forward", number), 0.0) for of, *_ in ranks)
        backward = max(of.compute.get(("unit backward", number), 0.0) for of, *_ in ranks)
        # Beside it is the reduction of the unit that backward came from.
        beside = reductions[number + 1] if number + 1 < len(root.units) else 0.0
        compute.append((forward, max(backward - contention * beside, 0.5 * backward)))
    return Costs(
        compute=tuple(compute),
        between=max(of.between for of, *_ in ranks),
        link=_link(root, shortest),
        copies=(
            statistics.mean(of.copies[0] for of, *_ in ranks),
            statistics.mean(of.copies[1] for of, *_ in ranks),
        ),
        contention=contention,
    )


def _run(root: Root, step: Callable[[], object], steps: int) -> _Figures:
    for _ in range(WARMUP):
        step()
    with profile(root.module, iterations=steps) as prof:
        for _ in range(steps):
            step()
    return _figures(prof.iterations)


def _figures(iterations: Sequence[Iteration]) -> _Figures:
    compute: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    wire: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    between = []
    for iteration in iterations:
        of_units: defaultdict[tuple[str, int], float] = defaultdict(float)
        for span, own in own_compute(iteration):
            # A forward that is recomputed for backward is part of that.
            recomputed = span.work == "unit forward" and span.phase == "backward"
            of_units["unit backward" if recomputed else span.work, span.first] += own
        for key, own in of_units.items():
            compute[key].append(own)
        for span in iteration.of(*WIRES):
            wire[span.work, span.nbytes].append(span.seconds)
        forward, backward = iteration.of("forward"), iteration.of("backward")
        between.append(backward[0].begin - forward[-1].end)
    return _Figures(
        compute={key: statistics.median(own) for key, own in compute.items()},
        between=statistics.median(between),
        wire={key: statistics.median(taken) for key, taken in wire.items()},
        copies=copy_rates(iterations),
    )


def _contention(alone: _Figures, ahead: _Figures | None, beside: float) -> float:
    """See Note [measuring costs]; ``beside``: what gathers take that compute was beside."""
    if ahead is None:
        return 0.0
    keys = [key for key in alone.compute if key[0] == "unit forward" and key in ahead.compute]
    longer = sum(ahead.compute[key] - alone.compute[key] for key in keys)
    return min(max(longer / beside, 0.0), 1.0) if beside > 0 else 0.0


def _link(root: Root, wire: dict[tuple[str, int], float]) -> Link:
    transport = root.units[0].settings.transport
    if isinstance(transport, Simulated):
        return transport.link.over(transport.world_size)
    fits = []
    for work, operation in _OPERATIONS.items():
        samples = [Sample(operation, n, s) for (of, n), s in wire.items() if of == work and n]
        try:
            fits.append(fit(samples))
        except ValueError:  # of one size, say
            fits.append(Fit(*root.link.costs()[WIRES.index(work)], residual=0.0))
    return link_of(f"{root.lanes.transport}, measured in steps", fits[0], fits[1])


def _wire_bytes(unit: Unit) -> tuple[int, int]:
    """Return what the unit's gather and its reduction carry, by itself, of all ranks."""
    layout = unit.layout_for(training=True)
    reduced = layout.grad_numel * unit.grad_dtypes()[1].itemsize
    return layout.gather_bytes * layout.world_size, reduced * layout.world_size
