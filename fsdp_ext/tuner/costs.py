"""The times of a model's units and collectives, measured in its own steps."""

# Note [measuring costs]
# Compute is measured while the wire is idle. Without prefetch, a unit waits for its gather before
# it computes, so forward computes alone. With prefetch, the same unit computes beside the next
# unit's gather. Its extra time, divided by the time that gather takes alone, is the contention that
# schedule.predict needs. Backward always runs beside reductions (and with replicas all-reduces), so
# their share, by the contention, is subtracted. Buckets of two sizes give collectives of several
# sizes, from which alpha and beta are fitted. If memory has no room for the larger buckets, units
# of several sizes may do; otherwise a typical link of the transport is used.

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_ext.comm.costs import typical_replica_link
from fsdp_ext.comm.fit import Fit, Sample, fit
from fsdp_ext.comm.link import Link
from fsdp_ext.comm.measure_link import link_of
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.profiler.api import profile
from fsdp_ext.profiler.recording import WIRES, Iteration, copy_rates, own_compute, wire_seconds
from fsdp_ext.sharding.agreement import exchange, together
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.unit import Unit

WARMUP = 2
_OPERATIONS = {"gather": "all_gather", "reduce": "reduce_scatter"}


@dataclass(frozen=True)
class Costs:
    """The times of the parts of a step, on the slowest rank.

    Args:
        compute: seconds of each unit's forward and backward alone, by the unit's number.
        between: seconds from the end of forward to the begin of backward: the loss.
        link: the fitted link of the collectives.
        copies: seconds per byte of a collective for the casts and copies around gathers and around
            reductions.
        contention: share of a collective's time that compute beside it loses, 0 to 1.
        replica_link: the fitted link of all-reduces over replicas; None if there are none.
    """

    compute: tuple[tuple[float, float], ...]
    between: float
    link: Link
    copies: tuple[float, float]
    contention: float
    replica_link: Link | None = None


@dataclass(frozen=True)
class _Figures:
    """Medians of one run on one rank."""

    compute: dict[tuple[str, int], float]
    between: float
    wire: dict[tuple[str, int], float]  # seconds, by operation and bytes
    copies: tuple[float, float]  # seconds per byte: copy_rates


@dataclass(frozen=True)
class Probes:
    """The runs that measure costs. All of them fit the memory limit.

    Args:
        steps: steps of each run, after a few steps of warm-up.
        merged: bucket size that merges several units, for collectives of a second size; None to
            leave that run out.
        ahead: whether to run with a prefetch, too, for the contention; otherwise it is 0.
    """

    steps: int
    merged: int | None
    ahead: bool


def measure_costs(
    root: Root, step: Callable[[], object], apply: Callable[[int, int], None], probes: Probes
) -> Costs:
    """Run steps in up to three ways and return the times of their parts. All ranks call this.

    Args:
        root: the root of the model.
        step: runs forward and backward.
        apply: sets the bucket_bytes of all units and the prefetch for the next steps.
        probes: the runs to make.
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
    # The rank that joins a collective last does not wait, so the shortest time is the wire's.
    shortest = {key: min(seconds) for key, seconds in wire.items()}
    sizes = [_wire_bytes(unit) for unit in root.units]
    gathers = [shortest.get(("gather", nbytes), 0.0) for nbytes, _ in sizes]
    reductions = [
        shortest.get(("reduce", nbytes), 0.0)
        + shortest.get(("all-reduce", nbytes // root.units[0].world_size), 0.0)
        for _, nbytes in sizes
    ]
    # The gathers of the root and of the first unit come before any compute.
    contention = statistics.median(
        _contention(first, last, sum(gathers[2:])) for first, _, last in ranks
    )
    return Costs(
        compute=_compute_alone([first for first, *_ in ranks], reductions, contention),
        between=max(of.between for of, *_ in ranks),
        link=_link(root, shortest),
        copies=(
            statistics.mean(of.copies[0] for of, *_ in ranks),
            statistics.mean(of.copies[1] for of, *_ in ranks),
        ),
        contention=contention,
        replica_link=_replica_link(root, shortest) if root.replicas is not None else None,
    )


def _compute_alone(
    ranks: Sequence[_Figures], reductions: Sequence[float], contention: float
) -> tuple[tuple[float, float], ...]:
    """Return the seconds of each unit's forward and backward on the slowest rank.

    Args:
        ranks: the figures of each rank without prefetch.
        reductions: seconds of each unit's reduction, with its all-reduce.
        contention: share of a reduction's time that backward beside it loses.
    """
    compute = []
    for number in range(len(reductions)):
        forward = max(of.compute.get(("unit forward", number), 0.0) for of in ranks)
        backward = max(of.compute.get(("unit backward", number), 0.0) for of in ranks)
        # Backward has just run the next unit, whose reduction runs beside this one.
        beside = reductions[number + 1] if number + 1 < len(reductions) else 0.0
        compute.append((forward, max(backward - contention * beside, 0.5 * backward)))
    return tuple(compute)


def _run(root: Root, step: Callable[[], object], steps: int) -> _Figures:
    for _ in range(WARMUP):
        step()
    with profile(root.module, iterations=steps) as prof:
        for _ in range(steps):
            step()
    return _figures(prof.iterations, one_wire=_has_one_wire(root))


def _has_one_wire(root: Root) -> bool:
    """Whether gathers and reductions share a wire: those that are composed of messages do."""
    return root.lanes.is_composed


def _figures(iterations: Sequence[Iteration], one_wire: bool = False) -> _Figures:
    compute: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    wire: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    between = []
    for iteration in iterations:
        of_units: defaultdict[tuple[str, int], float] = defaultdict(float)
        for span, own in own_compute(iteration):
            # A forward that backward recomputes is part of backward.
            recomputed = span.work == "unit forward" and span.phase == "backward"
            of_units["unit backward" if recomputed else span.work, span.first] += own
        for key, own in of_units.items():
            compute[key].append(own)
        for lane in WIRES:
            taken = wire_seconds(iteration, lane, one_wire)
            for span, seconds in zip(iteration.of(lane), taken, strict=True):
                wire[lane, span.nbytes].append(seconds)
        forward, backward = iteration.of("forward"), iteration.of("backward")
        between.append(backward[0].begin - forward[-1].end)
    return _Figures(
        compute={key: statistics.median(own) for key, own in compute.items()},
        between=statistics.median(between),
        wire={key: statistics.median(taken) for key, taken in wire.items()},
        copies=copy_rates(iterations),
    )


def _contention(alone: _Figures, ahead: _Figures | None, beside: float) -> float:
    """Return the contention: Note [measuring costs].

    ``beside`` is the seconds of the gathers that ran beside compute.
    """
    if ahead is None:
        return 0.0
    keys = [key for key in alone.compute if key[0] == "unit forward" and key in ahead.compute]
    longer = sum(ahead.compute[key] - alone.compute[key] for key in keys)
    return min(max(longer / beside, 0.0), 1.0) if beside > 0 else 0.0


def _link(root: Root, wire: dict[tuple[str, int], float]) -> Link:
    transport = root.units[0].settings.transport
    if isinstance(transport, Simulated):
        return transport.link.over(transport.shards)
    fits = []
    for work, operation in _OPERATIONS.items():
        samples = [Sample(operation, n, s) for (of, n), s in wire.items() if of == work and n]
        try:
            fits.append(fit(samples))
        except ValueError:  # all samples may have one size
            fits.append(Fit(*root.link.costs()[WIRES.index(work)], residual=0.0))
    link = link_of(f"{root.lanes.transport}, measured in steps", fits[0], fits[1])
    return replace(link, one_wire=_has_one_wire(root))


def _replica_link(root: Root, wire: dict[tuple[str, int], float]) -> Link:
    assert root.replicas is not None
    first = root.units[0]
    transport = first.settings.transport
    if isinstance(transport, Simulated):
        return transport.between_replicas().link
    # An all-reduce takes alpha + 2 S / beta.
    samples = [Sample("all_reduce", 2 * n, s) for (of, n), s in wire.items() if of == "all-reduce"]
    try:
        fitted = fit(samples)
    except ValueError:  # all samples may have one size
        name = root.replicas.transport
        typical = typical_replica_link(name, transport, first.world_size, first.replicas)
        fitted = Fit(*typical.costs()[1], residual=0.0)
    return link_of(f"{root.replicas.transport}, measured in steps", fitted, fitted)


def _wire_bytes(unit: Unit) -> tuple[int, int]:
    """Return the bytes of the unit's own gather and of its reduction, summed over all ranks."""
    layout = unit.layout_for(training=True)
    reduced = layout.grad_numel * unit.grad_dtypes()[1].itemsize
    return layout.gather_bytes * layout.world_size, reduced * layout.world_size
