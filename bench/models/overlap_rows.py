"""Measures one case of `python -m bench overlap`, and computes the most that it could hide."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.harness.options import UsageError
from bench.harness.runner import Row
from bench.harness.timing import Timing, as_microseconds
from bench.models.overlap_systems import (
    ALPHA,
    NO_BUCKETS,
    OURS,
    Case,
    Opened,
    open_system,
)
from bench.models.simulated_group import NO_TIME
from fsdp_ext import Link, profile
from fsdp_ext.planner.schedule import Prediction, Stage, predict


def seconds_of(step: Callable[[], None]) -> float:
    """Run a step; return its seconds."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def link_for(case: Case, repeats: int, device: torch.device) -> Link:
    """Return a link over which ours computes `case.ratio` times as long as it communicates.

    Compute is a step without a wire. Communication sends each unit by itself, with a prefetch of 1.
    All cases that are compared get the same link.

    Raises:
        UsageError: if latencies alone take longer than that, or nothing is sent.
    """
    alone = Case(OURS, case.shape, case.world_size, case.ratio, bucket_bytes=NO_BUCKETS)
    with open_system(alone, NO_TIME, device) as system:
        sent = system.sent
        # The first quartile: other load on the machine makes steps longer, never shorter.
        compute = Timing.of([seconds_of(system.free) for _ in range(repeats)]).low
    if not sent:
        raise UsageError(
            f"{case.world_size} ranks send nothing to each other; give a larger --world-size"
        )
    budget = compute / case.ratio - len(sent) * ALPHA
    if budget <= 0:
        raise UsageError(
            f"latencies alone ({len(sent)} x {ALPHA * 1e6:.0f} us) take 1/{case.ratio:g} of the "
            f"compute ({compute * 1e3:.1f} ms); give a smaller --ratio"
        )
    beta = sum(nbytes for _, nbytes in sent) / budget
    return Link(f"{beta / 1e9:.2f} GB/s", alpha=ALPHA, beta=beta)


def settings_of(case: Case) -> Row:
    """Return the settings of a case, which begin its row."""
    return {
        "system": case.system,
        "transport": "simulated",
        "simulated_ranks": case.world_size,
        "layers": case.shape.layers,
        "dim": case.shape.dim,
        "batch": case.shape.batch,
        "ratio": case.ratio,
        "prefetch": case.prefetch if case.system == OURS else None,
        "gap_us": case.gap * 1e6,
        "ahead": case.ahead,
    }


def row_of(case: Case, link: Link, repeats: int, device: torch.device) -> Row:
    """Measure one case; return its row, or for a peer that cannot run, a row with its error."""
    row = settings_of(case)
    row["link"] = f"simulated: {link.name}, {ALPHA * 1e6:.0f} us"
    try:
        with open_system(case, link, device) as system:
            return row | measured(case, link, system, repeats)
    except Exception as error:
        if case.system == OURS:
            raise
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def measured(case: Case, link: Link, system: Opened, repeats: int) -> Row:
    """Return a row's figures for steps with a wire and without one, which take turns."""

    def seconds_without_gap(step: Callable[[], None]) -> float:
        return seconds_of(step) - case.gap

    without, with_wire = [seconds_without_gap(system.free)], []
    with contextlib.ExitStack() as stack:
        ledgers = [stack.enter_context(profile(model, repeats)) for model in system.models]
        for _ in range(repeats):
            with_wire.append(seconds_without_gap(system.wired))
            without.append(seconds_without_gap(system.free))
    # Each step is compared with the two around it, because the noise changes slowly.
    exposed = [
        both - (before + after) / 2
        for both, (before, after) in zip(with_wire, itertools.pairwise(without), strict=True)
    ]
    wire = sum(link.seconds(operation, nbytes) for operation, nbytes in system.sent)
    hidden = Timing.of([1 - seconds / wire for seconds in exposed])
    compute = statistics.median(without)
    least = exposed_at_least(case, link, system, compute, wire)
    at_most = 1 - least / wire
    return {
        "bucket_bytes": system.bucket_bytes,
        "default_buckets": case.bucket_bytes is None if case.system == OURS else None,
        "buckets": len(system.buckets),
        "collectives": len(system.sent),
        "wires": system.wires,
        "compute_us": as_microseconds(Timing.of(without)),
        "simulated_wire_us": wire * 1e6,
        "simulated_step_us": as_microseconds(Timing.of(with_wire)),
        "simulated_exposed_us": as_microseconds(Timing.of(exposed)),
        "simulated_exposed_at_least_us": least * 1e6,
        "compute_over_simulated_wire": compute / wire,
        "simulated_hidden": hidden.median,
        "simulated_hidden_low": hidden.low,
        "simulated_hidden_high": hidden.high,
        "simulated_hidden_at_most": at_most,
        "simulated_hidden_at_most_on_one_link": min(1.0, compute / wire),
        "simulated_of_ideal": hidden.median / at_most if at_most > 0 else None,
        **(ledger_of(*ledgers, wire) if ledgers else {}),
    }


# - The ideal


def exposed_at_least(case: Case, link: Link, system: Opened, compute: float, wire: float) -> float:
    """Return the seconds that are exposed even if only the wire takes time.

    planner.schedule.predict computes them for two wires, without contention. The gap may hide the
    first gather. If all collectives share one wire, the step takes at least as long as the wire.
    """
    prediction = ideal(case, link, system.buckets, compute)
    in_gap = min(case.gap, link.seconds(*system.sent[0])) if case.ahead else 0.0
    return max(prediction.exposed - in_gap, wire - compute if system.wires == 1 else 0.0)


def ideal(case: Case, link: Link, buckets: Sequence[int], compute: float) -> Prediction:
    """Return the predicted step of a stack, whose compute is divided among buckets by bytes.

    The forward of a layer is one matrix product and its backward two. The backward of the first
    layer is only one, because the input needs no gradient.
    """
    unit = sum(buckets) / case.shape.layers
    product = compute / (3 * case.shape.layers - 1)
    stages = [
        Stage(
            f"bucket {number}",
            forward=product * nbytes / unit,
            backward=product * (2 * nbytes / unit - (number == 0)),
            gather_bytes=nbytes,
            reduce_bytes=nbytes,
        )
        for number, nbytes in enumerate(buckets)
    ]
    return predict(None, stages, link, depth=case.prefetch, contention=0.0)


# - The ledger


def ledger_of(alone: profile, both: profile, wire: float) -> Row:
    """Return the figures of the steps' profiles: medians, and the mean of each cause.

    Args:
        alone: the profile of the steps without a wire.
        both: the profile of the steps with one.
        wire: seconds of a step's collectives over the link; the hidden part is relative to it. In
            the ledger they last longer, because the lanes' threads wake up late.
    """

    def median(of: profile, figure: str) -> float:
        return statistics.median(getattr(iteration, figure) for iteration in of.iterations)

    exposed = median(both, "exposed")
    causes = both.summary().causes
    return {
        "ledger_compute_us": median(alone, "compute") * 1e6,
        # Waits until a lane's thread wakes up; the step without a wire has them, too.
        "ledger_waits_without_wire_us": median(alone, "exposed") * 1e6,
        "ledger_simulated_compute_us": median(both, "compute") * 1e6,
        "ledger_simulated_wire_us": median(both, "wire") * 1e6,
        "ledger_simulated_exposed_us": exposed * 1e6,
        "ledger_simulated_hidden": 1 - exposed / wire,
        "ledger_simulated_slowdown": slowdown(alone, both),
        "ledger_simulated_causes_us": {name: value * 1e6 for name, value in causes.items()},
    }


def slowdown(alone: profile, both: profile) -> float:
    """Return the compute time beside the wire, relative to that without one; waits do not count."""
    return statistics.median(
        beside.compute / by_itself.compute
        for by_itself, beside in zip(alone.iterations, both.iterations, strict=True)
    )
