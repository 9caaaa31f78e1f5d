"""The times of a model's units and collectives, measured once in its own steps."""

# Note [measuring costs]
# Each unit is a bucket of its own, and there is no prefetch. So a unit waits for its gather before
# it computes, and forward computes while the wire is idle. The time of backward includes the
# slowdown by concurrent reductions.
#
# The contention is not measured. It is 0 on GPUs and over simulated links. On CPUs, collectives use
# the cores that compute, so it is 0.5: `python -m bench predict` fits 0.2 to 0.9 there.

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence

from fsdp_ext.comm.costs import typical_link, typical_replica_link
from fsdp_ext.comm.link import Link, Sample, fit
from fsdp_ext.planner.times import StepCosts, UnitSeconds
from fsdp_ext.profiler.api import profile
from fsdp_ext.profiler.recording import (
    PASSES,
    WIRES,
    Iteration,
    copy_rates,
    own_compute,
    wire_seconds,
)
from fsdp_ext.sharding.params.settings import Choice, Decision
from fsdp_ext.sharding.root.agreement import exchange, together
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.tuner.trial import WARMUP, Trial

_CONTENTION = 0.5

# Measured seconds. The keys ("forward", 3) and ("backward", 3) have those of unit 3, and
# ("gather", 4096) those of a gather of 4,096 bytes. The root is unit 0, and its forward includes
# the loss. ("gather copies", 0) has the seconds per byte that copies around gathers take.
Seconds = dict[tuple[str, int], float]


def measure_costs(root: Root, trial: Trial, stays_unsharded: tuple[int, ...]) -> StepCosts:
    """Run steps and return the times of their parts, equal on all ranks, which call this together.

    The settings of ``root`` change. Units ``stays_unsharded`` stay unsharded after forward.
    """
    first = root.units[0]
    one_wire = root.lanes.is_composed  # messages of both lanes share the bandwidth
    with together(first, "tune", "the steps that measure its costs"):
        root.decide(Decision(Choice(0, 0, stays_unsharded), overrides=True))
        for _ in range(WARMUP):
            trial.step()
        with profile(root.module, iterations=trial.steps) as prof:
            for _ in range(trial.steps):
                trial.step()
        own = seconds_of(prof.iterations, one_wire)
    ranks = exchange(first, own)
    # The rank that joins a collective last does not wait, so the shortest time is the wire's.
    seconds = {
        key: (min if key[0] in WIRES else max)(of[key] for of in ranks if key in of)
        for key in dict.fromkeys(itertools.chain(*ranks))
    }
    compute = [
        UnitSeconds(*(seconds.get((of_pass, number), 0.0) for of_pass in PASSES))
        for number in range(len(root.units))
    ]
    within, between = _links(root, seconds, one_wire)
    on_cores = first.device.type == "cpu" and not root.lanes.is_simulated
    costs = StepCosts(
        compute,
        within,
        contention=_CONTENTION if on_cores else 0.0,
        copies=(seconds["gather copies", 0], seconds["reduce copies", 0]),
        replica_link=between,
    )
    # Ranks on unlike hosts may have unlike typical links, so all use those of the first rank.
    of_first: StepCosts = exchange(first, costs)[0]
    return of_first


def seconds_of(iterations: Sequence[Iteration], one_wire: bool = False) -> Seconds:
    """Return the medians of steps; ``one_wire`` says whether both lanes share the bandwidth."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for iteration in iterations:
        compute: defaultdict[tuple[str, int], float] = defaultdict(float)
        for span, own in own_compute(iteration):  # a forward that backward recomputes is backward's
            compute[span.phase, span.first] += own
        compute["forward", 0] += iteration.of("backward")[0].begin - iteration.of("forward")[-1].end
        for key, own in compute.items():
            found[key].append(own)
        for lane in WIRES:
            taken = wire_seconds(iteration, lane, one_wire)
            for span, own in zip(iteration.of(lane), taken, strict=True):
                found[lane, span.nbytes].append(own)
    gather, reduce = copy_rates(iterations)
    medians = {key: statistics.median(seconds) for key, seconds in found.items()}
    return medians | {("gather copies", 0): gather, ("reduce copies", 0): reduce}


def _links(root: Root, seconds: Seconds, one_wire: bool) -> tuple[Link, Link | None]:
    """Return the link of gathers and reductions, and the one between replicas if there are any."""
    first, replicas = root.units[0], root.replicas
    asked, shards = first.settings.transport, first.world_size
    is_simulated = root.lanes.is_simulated
    within, between = typical_link(root.lanes.transport, asked, shards), None
    if not is_simulated:
        gather, reduce = within.costs()
        within = Link(
            f"{root.lanes.transport}, measured in steps",
            *_fit(seconds, "gather", gather),
            *_fit(seconds, "reduce", reduce),
            one_wire=one_wire,
        )
    if replicas is not None:
        between = typical_replica_link(replicas.transport, asked, shards, first.replicas)
        if not is_simulated:
            summed = _fit(seconds, "all-reduce", between.costs()[1], times=2)  # alpha + 2 S / beta
            between = Link(f"{replicas.transport}, measured in steps", *summed)
    return within, between


def _fit(
    seconds: Seconds, lane: str, typical: tuple[float, float], times: int = 1
) -> tuple[float, float]:
    """Return alpha and beta of a lane.

    They are fitted to its collectives if these have different sizes. Otherwise the ``typical`` ones
    are scaled.
    """
    samples = [
        Sample(lane, times * nbytes, taken)
        for (of, nbytes), taken in seconds.items()
        if of == lane and nbytes > 0 and taken > 0
    ]
    sizes = [sample.nbytes for sample in samples]
    if sizes and max(sizes) >= 2 * min(sizes):
        with contextlib.suppress(ValueError):  # larger collectives took no longer
            fitted = fit(samples)
            return fitted.alpha, fitted.beta
    alpha, beta = typical
    ratios = [one.seconds / (alpha + one.nbytes / beta) for one in samples]
    ratio = statistics.median(ratios) if ratios else 1.0
    return alpha * ratio, beta / ratio
