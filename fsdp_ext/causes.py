"""Why communication shows: what each wait of the compute stream was for, and what would mend it.

A wait is cut up by what the lane that it waited for did. Note [causes]: going back from the
collective that a unit waited for, the lane was at work without a pause since some moment. If it
stood idle right before, then an earlier start, by as long as that at most, would have hidden as
much; why there was none is told by when the collective was issued, when it was first refused a
slot, and when its slot was free. What remains shows because the wire is slower than the compute
beside it: an earlier start was not to be had, for the lane was busy. Before the first unit of a
forward, or of a backward, there is no compute to hide behind, and behind the last one's gradients
there is none left.
"""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ext.ledger import WAITS, WIRES, Iteration, Span, merged_intervals, overlap, own_compute

# Pauses of a lane up to so long are its own: a worker that wakes, a kernel that is launched.
PAUSE = 50e-6
# A GPU that computes so soon after the host issued its work had been waiting for the host.
BEHIND = 20e-6
# A collective that takes so many times as long as its like usually do was held up by a rank.
HELD_UP = 2.0
# Compute beside so little of the wire counts as alone, beside so much as beside it.
ALONE, BESIDE = 0.2, 0.6


class Cause(enum.Enum):
    """Why a wait took as long as it did; the value is how reports call it."""

    FIRST = "first gather"
    LAST = "last reduction"
    ISSUED_LATE = "issued late"
    NO_SLOT = "no free slot"
    BANDWIDTH = "wire slower than compute"
    LATE_RANK = "a rank came late"
    UNKNOWN = "not in the ledger"


MEANING = {
    Cause.FIRST: "unavoidable: there is nothing to compute before the first unit is gathered",
    Cause.LAST: "unavoidable: there is nothing left to compute behind the last gradients",
    Cause.ISSUED_LATE: "the host, or the lane's thread, was behind",
    Cause.NO_SLOT: "the ring was too small to gather (so far) ahead, or prefetch=0",
    Cause.BANDWIDTH: "the wire was busy without a pause",
    Cause.LATE_RANK: "a collective ends when the last rank has come",
    Cause.UNKNOWN: "gathered by hand, or in an iteration that was not recorded",
}

REMEDY = {
    Cause.FIRST: "a smaller first bucket (bucket_bytes) makes it shorter",
    Cause.LAST: "a smaller last bucket (bucket_bytes) makes it shorter",
    Cause.ISSUED_LATE: (
        "larger units or buckets (bucket_bytes) need the host less often; leave the lanes' threads "
        "a core; run units in the same order in each step"
    ),
    Cause.NO_SLOT: "gather further ahead: a larger prefetch= (each step of it costs a slot)",
    Cause.BANDWIDTH: (
        "send less (param_dtype, reduce_dtype of MixedPrecisionPolicy), gather once "
        "(reshard_after_forward=False, as far as memory allows), compute more between (a larger "
        "batch), fewer ranks a group; where messages are small, larger buckets (bucket_bytes)"
    ),
    Cause.LATE_RANK: "look at that rank's input, host and clocks",
    Cause.UNKNOWN: "record whole iterations",
}


@dataclass(frozen=True)
class Exposure:
    """Part of a wait of the compute stream, by its cause.

    Args:
        operation: "gather" or "reduce".
        phase: in which what was waited for was issued: "forward", "backward" or "other".
        units: the first and the last unit of its bucket.
        begin: of the wait, seconds of ``time.monotonic()``.
        seconds: of the part.
        cause: why.
        rank: which came late, where ranks were merged; -1 where that is not known.
    """

    operation: str
    phase: str
    units: tuple[int, int]
    begin: float
    seconds: float
    cause: Cause
    rank: int = -1


@dataclass(frozen=True)
class Lateness:
    """By how much a collective began later on the slowest rank, and which that was."""

    seconds: float
    rank: int


@dataclass(frozen=True)
class Setting:
    """What the verdicts depend on besides the spans.

    Args:
        depth: of the prefetch.
        on_gpu: whether the compute stream is behind the host.
        typical: seconds of a collective, by its operation and bytes.
        late: by iteration and place among its spans, where ranks were merged.
    """

    depth: int
    on_gpu: bool
    typical: Mapping[tuple[str, int], float]
    late: Mapping[tuple[int, int], Lateness]


def typical_seconds(iterations: Sequence[Iteration]) -> dict[tuple[str, int], float]:
    """Return the median of how long collectives took, by operation and bytes."""
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for iteration in iterations:
        for span in iteration.of(*WIRES):
            taken[span.work, span.nbytes].append(span.seconds)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


def explain(iteration: Iteration, setting: Setting) -> list[Exposure]:
    """Return what the compute stream waited for and why, in order; it adds up to all waits."""
    index = {id(span): place for place, span in enumerate(iteration.spans)}
    # Waits for collectives that follow each other without a pause share what was idle before.
    used: defaultdict[float, float] = defaultdict(float)
    result: list[Exposure] = []
    for wait in iteration.of(*WAITS):
        if wait.seconds <= 0:
            continue
        if wait.work == "wait (gather)":
            result += _explain_gather(iteration, wait, index, setting, used)
        else:
            result += _explain_reduction(iteration, wait, index, setting)
    return sorted(result, key=lambda exposure: exposure.begin)


# - Gathers


def _explain_gather(
    iteration: Iteration,
    wait: Span,
    index: Mapping[int, int],
    setting: Setting,
    used: defaultdict[float, float],
) -> list[Exposure]:
    place = index[id(wait)]
    pieces = [
        span
        for span in iteration.of("gather")
        if span.concerns(wait.first) and index[id(span)] < place
    ]
    if not pieces:
        return [_exposure(wait, wait, wait.seconds, Cause.UNKNOWN)]
    awaited = pieces[-1]
    left = wait.seconds
    result = []
    late = _late(iteration, awaited, index, setting)
    if late is not None:
        part = min(left, late.seconds)
        left -= part
        result.append(_exposure(wait, awaited, part, Cause.LATE_RANK, late.rank))
    start, idle = _idle_before(iteration, awaited, wait, setting)
    rest = Cause.BANDWIDTH
    if _is_first(iteration, wait):
        rest = Cause.FIRST
        idle = {Cause.ISSUED_LATE: idle.get(Cause.ISSUED_LATE, 0.0)}
    total = sum(idle.values())
    early = min(left, max(total - used[start], 0.0))
    used[start] += early
    for cause, seconds in idle.items():
        if early * seconds > 0:
            result.append(_exposure(wait, awaited, early * seconds / total, cause))
    if left > early:
        result.append(_exposure(wait, awaited, left - early, rest))
    return result


def _is_first(iteration: Iteration, wait: Span) -> bool:
    """Whether no unit but those that enclose this one has begun to compute in this pass."""
    began = _pass_of(iteration, wait)
    return not any(
        began <= span.begin and span.end <= wait.begin
        for span in iteration.of(f"unit {wait.phase}")
    )


def _pass_of(iteration: Iteration, wait: Span) -> float:
    """Return when the forward or backward that the wait is in began, or the wait itself."""
    passes = [
        span.begin
        for span in iteration.of("forward", "backward")
        if span.begin <= wait.begin <= span.end
    ]
    return max(passes, default=wait.begin)


def _idle_before(
    iteration: Iteration, awaited: Span, wait: Span, setting: Setting
) -> tuple[float, dict[Cause, float]]:
    """Return when the lane set to work, and how long it had stood idle before, by why it did."""
    lane = iteration.lane("gather")
    busy = merged_intervals(lane, PAUSE)
    start = max((low for low, _ in busy if low <= awaited.begin), default=awaited.begin)
    before = max((high for _, high in busy if high < start), default=0.0)
    lower = max(before, _pass_of(iteration, wait))
    if start <= lower:
        return start, {}
    first = next(span for span in lane if span.begin >= start and span.work in WIRES)
    issued = min(max(first.issued, lower), start)
    slot_free = min(max(first.possible, issued), start)
    why_not_issued = _why_not_issued(iteration, first, setting)
    result: defaultdict[Cause, float] = defaultdict(float)
    result[why_not_issued] += issued - lower
    result[Cause.NO_SLOT] += slot_free - issued
    result[Cause.ISSUED_LATE] += start - slot_free
    return start, dict(result)


def _why_not_issued(iteration: Iteration, gather: Span, setting: Setting) -> Cause:
    """Return why a gather was not issued before it was."""
    if gather.refused > 0 or setting.depth == 0:
        return Cause.NO_SLOT
    if gather.on_demand:
        return Cause.ISSUED_LATE  # nothing told that its unit would be next
    if setting.on_gpu:
        # What began to compute next had it waited for the host?
        begins = [
            span.begin
            for span in iteration.of("unit forward", "unit backward")
            if span.begin >= gather.issued
        ]
        if begins and min(begins) - gather.issued < BEHIND:
            return Cause.ISSUED_LATE
    return Cause.NO_SLOT


def _late(
    iteration: Iteration, span: Span, index: Mapping[int, int], setting: Setting
) -> Lateness | None:
    """Return by how much a rank held the collective up, if one did."""
    if setting.late:
        found = setting.late.get((iteration.number, index[id(span)]))
        return found if found is not None and found.seconds > PAUSE else None
    usual = setting.typical.get((span.work, span.nbytes), span.seconds)
    if span.seconds > HELD_UP * usual + PAUSE:
        return Lateness(span.seconds - usual, -1)
    return None


# - Reductions


def _explain_reduction(
    iteration: Iteration, wait: Span, index: Mapping[int, int], setting: Setting
) -> list[Exposure]:
    """Cut the wait up by what the lane of reductions did meanwhile."""
    place = index[id(wait)]
    lane = [span for span in iteration.lane("reduce") if index[id(span)] < place]
    inside = [span for span in lane if span.end > wait.begin and span.begin < wait.end]
    reductions = [span for span in lane if span.work == "reduce"]
    if not inside:
        if not reductions:
            return [_exposure(wait, wait, wait.seconds, Cause.UNKNOWN)]
        # The lane is done, and what is left is to notice it.
        return [_exposure(wait, reductions[-1], wait.seconds, Cause.LAST)]
    result = []
    reached = wait.begin
    for span in inside:
        begin, end = max(span.begin, reached), min(span.end, wait.end)
        if begin > reached:
            result.append(_gap(wait, span, begin - reached))
        if end > begin:
            result += _of_lane(iteration, wait, span, end - begin, index, setting)
        reached = max(reached, end)
    if wait.end > reached:
        result.append(_of_reduction(wait, inside[-1], wait.end - reached, iteration))
    return result


def _gap(wait: Span, following: Span, seconds: float) -> Exposure:
    """Return what a pause of the lane, before something that it was to do, counts as."""
    cause = Cause.ISSUED_LATE if seconds > PAUSE else Cause.LAST
    return _exposure(wait, following, seconds, cause)


def _of_lane(
    iteration: Iteration,
    wait: Span,
    span: Span,
    seconds: float,
    index: Mapping[int, int],
    setting: Setting,
) -> list[Exposure]:
    late = _late(iteration, span, index, setting) if span.work in WIRES else None
    if late is None:
        return [_of_reduction(wait, span, seconds, iteration)]
    part = min(seconds, late.seconds)
    result = [_exposure(wait, span, part, Cause.LATE_RANK, late.rank)]
    if seconds > part:
        result.append(_of_reduction(wait, span, seconds - part, iteration))
    return result


def _of_reduction(wait: Span, span: Span, seconds: float, iteration: Iteration) -> Exposure:
    last = iteration.of("reduce")[-1].units if iteration.of("reduce") else span.units
    cause = Cause.LAST if span.units == last else Cause.BANDWIDTH
    return _exposure(wait, span, seconds, cause)


def _exposure(wait: Span, awaited: Span, seconds: float, cause: Cause, rank: int = -1) -> Exposure:
    operation = "gather" if wait.work == "wait (gather)" else "reduce"
    return Exposure(operation, awaited.phase, awaited.units, wait.begin, seconds, cause, rank)


# - Compute


@dataclass(frozen=True)
class Slowdown:
    """How much longer units compute beside communication than alone.

    Args:
        factor: of the time, over the units that could be compared.
        seconds: that it costs a step, about.
        compared: how many kinds of units were seen both ways.
    """

    factor: float
    seconds: float
    compared: int


def slowdown(iterations: Sequence[Iteration], sizes: Sequence[int]) -> Slowdown | None:
    """Compare units of one size that computed beside communication with those that did alone.

    Args:
        iterations: of one rank.
        sizes: bytes of each unit's parameters, by its number; units of one size are taken for
            alike.

    Returns:
        None where no kind of unit was seen both ways: an estimate needs units of equal size, of
        which some compute while the lanes have nothing to do.
    """
    alone: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    beside: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for iteration in iterations:
        wires = merged_intervals(sorted(iteration.of(*WIRES), key=lambda span: span.begin), 0.0)
        for span, own in own_compute(iteration):
            if span.seconds <= 0 or own < 0.5 * span.seconds:
                continue  # encloses others, which are looked at themselves
            key = (span.work, sizes[span.first])
            part = overlap(span.begin, span.end, wires) / span.seconds
            if part < ALONE:
                alone[key].append(own)
            elif part > BESIDE:
                beside[key].append(own)
    both = [key for key in alone if key in beside]
    if not both:
        return None
    would = sum(statistics.median(alone[key]) * len(beside[key]) for key in both)
    took = sum(sum(beside[key]) for key in both)
    return Slowdown(took / would, (took - would) / len(iterations), len(both))
