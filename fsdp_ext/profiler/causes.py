"""Why communication shows: what each wait of the compute stream was for, and what would mend it."""

# Note [causes]
# A wait is cut up by what the lane that it waited for did. Going back from the collective that a
# unit waited for, the lane was at work without a pause since some moment. If it stood idle right
# before, then an earlier start, by as long as that at most, would have hidden as much; why there
# was none is told by when the collective was issued, when it was first refused a slot, and when its
# slot was free. What remains shows because the wire is slower than the compute beside it: an
# earlier start was not to be had, for the lane was busy. Before the first unit of a forward, or of
# a backward, there is no compute to hide behind, and behind the last one's gradients there is none
# left.

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_ext.profiler.recording import (
    COMPUTE,
    PASSES,
    WAITS,
    WIRES,
    Iteration,
    Span,
    merged_intervals,
    overlap,
    own_compute,
)

# Pauses of a lane up to so long are its own: a worker that wakes, a kernel that is launched.
PAUSE = 50e-6
# A GPU that comes to a unit so soon after the host did had been waiting for the host.
BEHIND = 30e-6
# A collective that takes so many times as long as its like usually do was held up by a rank.
HELD_UP = 2.0
# Compute beside so little of the wire counts as alone, beside so much as beside it.
ALONE, BESIDE = 0.2, 0.6


class Cause(enum.Enum):
    """Why communication shows; the value is how reports call it.

    All but SLOWED, which waits do not show, are why a wait took as long as it did.
    """

    FIRST = "first gather"
    LAST = "last reduction"
    ISSUED_LATE = "issued late"
    NO_SLOT = "no free slot"
    BANDWIDTH = "wire slower than compute"
    LATE_RANK = "a rank came late"
    COPIES = "casts and copies"
    SLOWED = "compute slowed by communication"
    UNKNOWN = "not in the ledger"


MEANING = {
    Cause.FIRST: "unavoidable: there is nothing to compute before the first unit is gathered",
    Cause.LAST: "unavoidable: there is nothing left to compute behind the last gradients",
    Cause.ISSUED_LATE: "the host, the lane's thread, or who waited for it, was behind",
    Cause.NO_SLOT: "the ring was too small to gather (so far) ahead, or prefetch=0",
    Cause.BANDWIDTH: "the wire was busy without a pause",
    Cause.LATE_RANK: "a collective ends when the last rank has come",
    Cause.COPIES: "there is no wire, but another dtype",
    Cause.SLOWED: "memory or cores are shared; estimated by comparing units of equal size",
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
    Cause.COPIES: "the optimizer's dtype for computation, too, where one rank is all there is",
    Cause.SLOWED: (
        "leave collectives cores of their own (fewer OMP_NUM_THREADS), or fewer multiprocessors "
        "(NCCL_MAX_CTAS); send less (param_dtype, reduce_dtype of MixedPrecisionPolicy)"
    ),
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
    """By how much a collective began later on the slowest rank, and which that was.

    ``spread`` is between the first rank and the last one, the same on all of them.
    """

    seconds: float
    rank: int
    spread: float = 0.0


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


class _Step:
    """One iteration, with what all its waits ask for."""

    def __init__(self, iteration: Iteration, setting: Setting) -> None:
        self.iteration = iteration
        self.setting = setting
        self.place = {id(span): place for place, span in enumerate(iteration.spans)}
        self.lanes = {name: iteration.lane(name) for name in WIRES}
        self.busy = merged_intervals(self.lanes["gather"], PAUSE)
        self.passes = iteration.of(*PASSES)
        # Of each bucket, in order of issue; its casts where it has no wire.
        self.gathers: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in iteration.of("gather") or iteration.of("cast"):
            self.gathers[span.units].append(span)
        ends = {phase: iteration.of(f"unit {phase}") for phase in PASSES}
        self.first_end = {
            (span.begin, span.work): min(
                (unit.end for unit in ends[span.work] if unit.begin >= span.begin), default=math.inf
            )
            for span in self.passes
        }
        self.last_reduced = [span.units for span in iteration.of("reduce")[-1:]]
        # Waits for collectives that follow each other without a pause share what was idle before.
        self.used: defaultdict[float, float] = defaultdict(float)

    def pass_of(self, wait: Span) -> Span | None:
        """Return the forward or backward that the wait is in."""
        inside = [span for span in self.passes if span.begin <= wait.begin <= span.end]
        return inside[-1] if inside else None

    def late(self, span: Span) -> Lateness | None:
        """Return by how much a rank held the collective up, if one did."""
        setting = self.setting
        if setting.late:
            found = setting.late.get((self.iteration.number, self.place[id(span)]))
            return found if found is not None and found.seconds > PAUSE else None
        usual = setting.typical.get((span.work, span.nbytes), span.seconds)
        if span.work in WIRES and span.seconds > HELD_UP * usual + PAUSE:
            return Lateness(span.seconds - usual, -1)
        return None


def explain(iteration: Iteration, setting: Setting) -> list[Exposure]:
    """Return what the compute stream waited for and why, in order; it adds up to all waits."""
    step = _Step(iteration, setting)
    result: list[Exposure] = []
    for wait in iteration.of(*WAITS):
        if wait.seconds <= 0:
            continue
        if wait.work == "wait (gather)":
            result += _explain_gather(step, wait)
        else:
            result += _explain_reduction(step, wait)
    return sorted(result, key=lambda exposure: exposure.begin)


# - Gathers


def _explain_gather(step: _Step, wait: Span) -> list[Exposure]:
    place = step.place[id(wait)]
    pieces = [span for span in step.gathers[wait.units] if step.place[id(span)] < place]
    if not pieces:
        return [_exposure(wait, wait, wait.seconds, Cause.UNKNOWN)]
    # Of several pieces a unit waits for one, which is done when the wait is.
    arrived = [span for span in pieces if span.end <= wait.end + PAUSE]
    awaited = (arrived or pieces)[-1]
    if awaited.work == "cast":
        return [_exposure(wait, awaited, wait.seconds, Cause.COPIES)]
    left = wait.seconds
    result = []
    # Who waits may notice late that the lane is done.
    done = max(
        span.end
        for span in step.lanes["gather"]
        if span.units == awaited.units and step.place[id(span)] < place
    )
    noticed = wait.end - max(done, wait.begin)
    if noticed > PAUSE and done <= wait.end:
        left -= noticed
        result.append(_exposure(wait, awaited, noticed, Cause.ISSUED_LATE))
    late = step.late(awaited)
    if late is not None:
        part = min(left, late.seconds)
        left -= part
        result.append(_exposure(wait, awaited, part, Cause.LATE_RANK, late.rank))
    start, idle = _idle_before(step, awaited, wait)
    rest = Cause.BANDWIDTH
    if _is_first(step, wait):
        rest = Cause.FIRST
        idle = {Cause.ISSUED_LATE: idle.get(Cause.ISSUED_LATE, 0.0)}
    total = sum(idle.values())
    early = min(left, max(total - step.used[start], 0.0))
    step.used[start] += early
    for cause, seconds in idle.items():
        if early * seconds > 0:
            result.append(_exposure(wait, awaited, early * seconds / total, cause))
    if left > early:
        result.append(_exposure(wait, awaited, left - early, rest))
    return result


def _is_first(step: _Step, wait: Span) -> bool:
    """Whether no unit but those that enclose this one has computed in this pass."""
    of = step.pass_of(wait)
    return of is None or step.first_end[of.begin, of.work] > wait.begin


def _idle_before(step: _Step, awaited: Span, wait: Span) -> tuple[float, dict[Cause, float]]:
    """Return when the lane set to work, and how long it had stood idle before, by why it did."""
    start = max((low for low, _ in step.busy if low <= awaited.begin), default=awaited.begin)
    before = max((high for _, high in step.busy if high < start), default=0.0)
    of = step.pass_of(wait)
    lower = max(before, wait.begin if of is None else of.begin)
    if start <= lower:
        return start, {}
    lane = step.lanes["gather"]
    first = next(span for span in lane if span.begin >= start and span.work in WIRES)
    issued = min(max(first.issued, lower), start)
    slot_free = min(max(first.possible, issued), start)
    refused = min(max(first.refused, lower), issued) if first.refused > 0 else issued
    result: defaultdict[Cause, float] = defaultdict(float)
    result[_why_not_issued(step, first)] += refused - lower
    result[Cause.NO_SLOT] += issued - refused + slot_free - issued
    result[Cause.ISSUED_LATE] += start - slot_free
    return start, dict(result)


def _why_not_issued(step: _Step, gather: Span) -> Cause:
    """Return why a gather was not issued, nor refused a slot, before it was."""
    if step.setting.depth == 0:
        return Cause.NO_SLOT
    if gather.on_demand and gather.refused == 0:
        return Cause.ISSUED_LATE  # nothing told that its unit would be next
    if step.setting.on_gpu:
        # Did the GPU compute what was issued with it as soon as the host came there?
        after = [span for span in step.iteration.of(*COMPUTE) if span.begin >= gather.issued]
        if after and min(after, key=lambda span: span.begin).lead < BEHIND:
            return Cause.ISSUED_LATE
    return Cause.NO_SLOT


# - Reductions


def _explain_reduction(step: _Step, wait: Span) -> list[Exposure]:
    """Cut the wait up by what the lane of reductions did meanwhile."""
    place = step.place[id(wait)]
    lane = [span for span in step.lanes["reduce"] if step.place[id(span)] < place]
    inside = [span for span in lane if span.end > wait.begin and span.begin < wait.end]
    if not inside:
        if not lane:
            return [_exposure(wait, wait, wait.seconds, Cause.UNKNOWN)]
        # The lane is done, and what is left is to notice it.
        return [_gap(step, wait, lane[-1], wait.seconds)]
    result = []
    reached = wait.begin
    for span in inside:
        begin, end = max(span.begin, reached), min(span.end, wait.end)
        if begin > reached:
            result.append(_gap(step, wait, span, begin - reached))
        if end > begin:
            result += _of_lane(step, wait, span, end - begin)
        reached = max(reached, end)
    if wait.end > reached:
        result.append(_gap(step, wait, inside[-1], wait.end - reached))
    return result


def _gap(step: _Step, wait: Span, beside: Span, seconds: float) -> Exposure:
    """Return what a time counts as in which the lane did nothing, beside this span of its."""
    if seconds > PAUSE:
        return _exposure(wait, beside, seconds, Cause.ISSUED_LATE)
    return _of_reduction(step, wait, beside, seconds)


def _of_lane(step: _Step, wait: Span, span: Span, seconds: float) -> list[Exposure]:
    late = step.late(span)
    if late is None:
        return [_of_reduction(step, wait, span, seconds)]
    part = min(seconds, late.seconds)
    result = [_exposure(wait, span, part, Cause.LATE_RANK, late.rank)]
    if seconds > part:
        result.append(_of_reduction(step, wait, span, seconds - part))
    return result


def _of_reduction(step: _Step, wait: Span, span: Span, seconds: float) -> Exposure:
    if not step.last_reduced:  # nothing is on a wire
        return _exposure(wait, span, seconds, Cause.COPIES)
    cause = Cause.LAST if span.units in step.last_reduced else Cause.BANDWIDTH
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


def slowdown(iterations: Sequence[Iteration], kinds: Sequence[Hashable]) -> Slowdown | None:
    """Compare units of one kind that computed beside communication with those that did alone.

    Args:
        iterations: of one rank.
        kinds: of each unit, by its number: units of one kind are taken for alike.

    Returns:
        None where no kind of unit was seen both ways: an estimate needs alike units, of which two
        or more compute while the lanes have nothing to do.
    """
    alone: defaultdict[tuple[str, Hashable], dict[int, list[float]]] = defaultdict(dict)
    beside: defaultdict[tuple[str, Hashable], list[float]] = defaultdict(list)
    for iteration in iterations:
        wires = merged_intervals(sorted(iteration.of(*WIRES), key=lambda span: span.begin), 0.0)
        for span, own in own_compute(iteration):
            if span.seconds <= 0 or own < 0.5 * span.seconds:
                continue  # encloses others, which are looked at themselves
            key = (span.work, kinds[span.first])
            part = overlap(span.begin, span.end, wires) / span.seconds
            if part < ALONE:
                alone[key].setdefault(span.first, []).append(own)
            elif part > BESIDE:
                beside[key].append(own)
    # One alone may differ from the others by more than what is beside it.
    both = [key for key in alone if key in beside and len(alone[key]) > 1]
    if not both:
        return None
    # Of medians, since something else that the machine did once is not communication's doing.
    own_time = {key: statistics.median(itertools.chain(*alone[key].values())) for key in both}
    would = sum(own_time[key] * len(beside[key]) for key in both)
    took = sum(statistics.median(beside[key]) * len(beside[key]) for key in both)
    return Slowdown(took / would, (took - would) / len(iterations), len(both))
