"""Why communication is exposed: the cause of each wait of the compute stream, and its remedy."""

# Note [causes]
# A wait is cut into parts by the activity of the lane that it waited for. The lane worked without a
# pause from some moment until the awaited collective was done. If the lane was idle right before
# that moment, an earlier start could have hidden at most as many seconds as the lane was idle. The
# reason for the late start follows from three times: when the collective was issued, when it was
# first refused a slot, and when its slot was free. The rest of the wait is exposed because the wire
# is slower than the compute beside it: the lane was busy and could not have started earlier. With
# replicas, reductions have two lanes. The end of backward waits for the all-reduces, so the other
# lane explains only the time in which none ran. Packing waits for the lane of reductions first. Two
# exposed parts have nothing to hide behind in their pass. Before the first unit of a forward or a
# backward there is no compute yet that could hide its gather; only a gather ahead of forward may be
# hidden by the loader. After the last unit's gradients no compute is left. A gather that was issued
# between steps belongs to the iteration before, unlike the wait for it.

from __future__ import annotations

import enum
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ext.profiler.recording import (
    COLLECTIVES,
    COMPUTE,
    OPTIMIZER,
    PASSES,
    WAITS,
    WIRES,
    Iteration,
    Span,
    merged_intervals,
)

_GATHERS = ("gather", "group gather")
# Seconds. A shorter pause of a lane is not idle time: its thread wakes up, or a kernel is launched.
PAUSE = 50e-6
# Seconds. A GPU that reaches a unit this soon after the host issued it has waited for the host.
BEHIND = 30e-6
# A collective that takes more than this many times its usual time was delayed by a rank.
HELD_UP = 2.0


class Cause(enum.Enum):
    """Why communication is exposed. Reports print the value.

    Each cause but SLOWED explains waits. SLOWED concerns compute, and no wait shows it.
    """

    FIRST = "first gather"
    AHEAD = "gather ahead of forward"
    LAST = "last reduction"
    ISSUED_LATE = "issued late"
    NO_SLOT = "no free slot"
    BANDWIDTH = "wire slower than compute"
    LATE_RANK = "a rank came late"
    COPIES = "casts and copies"
    OPTIMIZER = "optimizer"
    SLOWED = "compute slowed by communication"
    UNKNOWN = "not recorded"


MEANING = {
    Cause.FIRST: "no compute of a pass can run before its first unit is gathered",
    Cause.AHEAD: "issued before forward, by prefetch_next_forward() or unshard(), but too late",
    Cause.LAST: "unavoidable: no compute is left once the last gradients are reduced",
    Cause.ISSUED_LATE: "the host or a lane's thread was behind, or the waiter woke up late",
    Cause.NO_SLOT: "the ring had no free slot to prefetch into, or prefetch is 0",
    Cause.BANDWIDTH: "the wire was busy all the time",
    Cause.LATE_RANK: "a collective ends only after the last rank has joined it",
    Cause.COPIES: "nothing is sent, but parameters or gradients are cast",
    Cause.OPTIMIZER: "updates of an attached optimizer are on the lane of reductions",
    Cause.SLOWED: (
        "compute and communication share memory or cores; estimated by comparing units of equal "
        "size"
    ),
    Cause.UNKNOWN: "issued in a step that was not recorded",
}

REMEDY = {
    Cause.FIRST: (
        "in forward, call prefetch_next_forward() after the optimizer's step, so that the loader "
        "hides it; make the first bucket smaller (bucket_bytes)"
    ),
    Cause.AHEAD: (
        "call prefetch_next_forward() right after the optimizer's step; make the first bucket "
        "smaller (bucket_bytes)"
    ),
    Cause.LAST: "make the last bucket smaller (bucket_bytes)",
    Cause.ISSUED_LATE: (
        "use larger units or buckets (bucket_bytes), so that the host launches less; leave a core "
        "to the lanes' threads; run units in the same order in each step"
    ),
    Cause.NO_SLOT: "prefetch further ahead (prefetch); each bucket more takes a slot",
    Cause.BANDWIDTH: (
        "send less (param_dtype and reduce_dtype of MixedPrecisionPolicy); gather only once "
        "(reshard_after_forward=False, if memory allows); compute more per step (a larger batch); "
        "use fewer ranks per group; use larger buckets where messages are small (bucket_bytes)"
    ),
    Cause.LATE_RANK: "check that rank's input pipeline, host and clocks",
    Cause.COPIES: "with one rank, compute in the dtype that the optimizer uses",
    Cause.OPTIMIZER: "make the last bucket smaller (bucket_bytes), or do not attach the optimizer",
    Cause.SLOWED: (
        "leave cores to collectives (a smaller OMP_NUM_THREADS) or give them fewer multiprocessors "
        "(NCCL_MAX_CTAS); send less (param_dtype and reduce_dtype of MixedPrecisionPolicy)"
    ),
    Cause.UNKNOWN: "record whole steps",
}


@dataclass(frozen=True)
class Exposure:
    """A part of a wait of the compute stream, and its cause.

    Args:
        operation: "gather", "group gather", "reduce" or "all-reduce", or "optimizer" for the update
            of an attached one.
        phase: the phase that issued the awaited work: "forward", "backward" or "other".
        units: numbers of the first and the last unit of the awaited bucket.
        begin: when the wait began, in seconds of ``time.monotonic()``.
        seconds: length of this part.
        cause: its cause.
        rank: the rank that came late; -1 if that is unknown or not the cause.
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
    """The straggler of a collective: the rank that joined it last.

    Args:
        seconds: how much later than this rank the straggler began.
        rank: the straggler.
        spread: seconds from the begin on the first rank to the begin on the straggler. It is the
            same on all ranks.
    """

    seconds: float
    rank: int
    spread: float = 0.0


@dataclass(frozen=True)
class Context:
    """The inputs of the causes besides the spans."""

    depth: int  # of the prefetch
    on_gpu: bool  # whether the compute stream runs behind the host
    # Usual seconds of a collective, by its operation and bytes.
    typical: Mapping[tuple[str, int], float]
    # The straggler of each collective, by iteration number and index among its spans. It is empty
    # unless ranks were merged, and has no group gathers.
    late: Mapping[tuple[int, int], Lateness]
    # The cause of the seconds that a collective took longer than usual. Over simulated links no
    # other rank exists, so there it is ISSUED_LATE.
    delayed: Cause = Cause.LATE_RANK


def typical_seconds(iterations: Sequence[Iteration]) -> dict[tuple[str, int], float]:
    """Return the median seconds of collectives, by operation and bytes."""
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for iteration in iterations:
        for span in iteration.of(*COLLECTIVES):
            taken[span.work, span.nbytes].append(span.seconds)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


class _Step:
    """One iteration, indexed for the explanation of waits."""

    def __init__(self, iteration: Iteration, context: Context, before: Iteration | None) -> None:
        self.iteration = iteration
        self.context = context
        self.index = {id(span): index for index, span in enumerate(iteration.spans)}
        self.lanes = {name: iteration.lane(name) for name in WIRES}
        self.busy = merged_intervals(self.lanes["gather"], PAUSE)
        self.passes = iteration.of(*PASSES)
        # Gathers of each bucket in order of issue; casts instead if nothing is on the wire.
        self.gathers: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        gathers = sorted(iteration.of(*_GATHERS), key=lambda span: self.index[id(span)])
        for span in gathers or iteration.of("cast"):
            self.gathers[span.units].append(span)
        # The last gather of each bucket that was issued between the iteration before and this one.
        earlier = before.of("gather") or before.of("cast") if before is not None else []
        self.ahead = {span.units: span for span in earlier if span.phase == "other"}
        ends = {name: iteration.of(f"unit {name}") for name in PASSES}
        self.first_end = {
            (span.begin, span.work): min(
                (unit.end for unit in ends[span.work] if unit.begin >= span.begin), default=math.inf
            )
            for span in self.passes
        }
        reductions = iteration.of("all-reduce") or iteration.of("reduce")
        self.last_reduced = [span.units for span in reductions[-1:]]
        # Idle seconds that are already explained, by when the lane began to work after them. Waits
        # share them if their collectives follow each other without a pause.
        self.used: defaultdict[float, float] = defaultdict(float)

    def is_before(self, span: Span, wait: Span) -> bool:
        """Return whether the span was issued before the wait."""
        return self.index[id(span)] < self.index[id(wait)]

    def operation(self, span: Span) -> str:
        """Return the collective whose lane runs the work of a reduction."""
        return self.iteration.lane_of(span.work) or "reduce"

    def pass_of(self, wait: Span) -> Span | None:
        """Return the forward or backward that contains the wait."""
        inside = [span for span in self.passes if span.begin <= wait.begin <= span.end]
        return inside[-1] if inside else None

    def late(self, span: Span) -> Lateness | None:
        """Return how long a straggler delayed the collective; None if none did."""
        context = self.context
        known = context.late.get((self.iteration.number, self.index[id(span)]))
        if known is not None:
            return known if known.seconds > PAUSE else None
        usual = context.typical.get((span.work, span.nbytes), span.seconds)
        if span.work in COLLECTIVES and span.seconds > HELD_UP * usual + PAUSE:
            return Lateness(span.seconds - usual, -1)
        return None


def explain(
    iteration: Iteration, context: Context, before: Iteration | None = None
) -> list[Exposure]:
    """Return the causes of all waits of the compute stream, in order of their begin.

    The seconds of the exposures add up to the seconds of the waits.

    Args:
        iteration: the iteration.
        context: the other inputs.
        before: the iteration right before it, if that is recorded.
    """
    step = _Step(iteration, context, before)
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
    messages = [span for span in step.gathers[wait.units] if step.is_before(span, wait)]
    if not messages:
        cause = Cause.AHEAD if wait.units in step.ahead else Cause.UNKNOWN
        issued = step.ahead.get(wait.units, wait)
        return [_exposure("gather", wait, issued, wait.seconds, cause)]
    # A unit waits for only one of its bucket's messages, the one that ends with the wait.
    arrived = [span for span in messages if span.end <= wait.end + PAUSE]
    awaited = (arrived or messages)[-1]
    if awaited.work == "cast":
        return [_exposure("gather", wait, awaited, wait.seconds, Cause.COPIES)]
    left, found = wait.seconds, list[Exposure]()

    def cut(seconds: float, cause: Cause, rank: int = -1) -> None:
        """Attribute up to ``seconds`` of the remaining wait to ``cause``."""
        nonlocal left
        part = min(left, seconds)
        if part > 0:
            left -= part
            found.append(_exposure(awaited.work, wait, awaited, part, cause, rank))

    cut(_late_wakeup(step, wait, awaited), Cause.ISSUED_LATE)
    late = step.late(awaited)
    if late is not None:
        cut(late.seconds, step.context.delayed, late.rank)
    start, idle = _idle_before(step, awaited, wait)
    around = step.pass_of(wait)
    # A gather is among the first if no unit of this forward or backward has computed before it.
    is_first = around is None or step.first_end[around.begin, around.work] > wait.begin
    if is_first:
        idle = {Cause.ISSUED_LATE: idle.get(Cause.ISSUED_LATE, 0.0)}
    # If the lane had not been idle, this part of the wait would be hidden. It is divided among the
    # causes in proportion to their idle seconds.
    early = min(left, max(sum(idle.values()) - step.used[start], 0.0))
    step.used[start] += early
    left -= early
    for cause, share in idle.items():
        if early * share > 0:
            part = early * share / sum(idle.values())
            found.append(_exposure(awaited.work, wait, awaited, part, cause))
    cut(left, Cause.FIRST if is_first else Cause.BANDWIDTH)
    return found


def _late_wakeup(step: _Step, wait: Span, awaited: Span) -> float:
    """Return the seconds from the end of the lane's work to the end of the wait.

    The waiter may wake up after the lane has finished.
    """
    done = max(
        span.end
        for span in step.lanes["gather"]
        if span.units == awaited.units and step.is_before(span, wait)
    )
    seconds = wait.end - max(done, wait.begin)
    return seconds if seconds > PAUSE and done <= wait.end else 0.0


def _idle_before(step: _Step, awaited: Span, wait: Span) -> tuple[float, dict[Cause, float]]:
    """Return when the lane began to work, and its idle seconds before that, by cause."""
    start = max((low for low, _ in step.busy if low <= awaited.begin), default=awaited.begin)
    before = max((high for _, high in step.busy if high < start), default=0.0)
    around = step.pass_of(wait)
    lower = max(before, wait.begin if around is None else around.begin)
    if start <= lower:
        return start, {}
    lane = step.lanes["gather"]
    first = next(span for span in lane if span.begin >= start and span.work in COLLECTIVES)
    issued = min(max(first.issued, lower), start)
    slot_free = min(max(first.possible, issued), start)
    refused = min(max(first.refused, lower), issued) if first.refused > 0 else issued
    result: defaultdict[Cause, float] = defaultdict(float)
    result[_why_not_issued(step, first)] += refused - lower
    result[Cause.NO_SLOT] += issued - refused + slot_free - issued
    result[Cause.ISSUED_LATE] += start - slot_free
    return start, dict(result)


def _why_not_issued(step: _Step, gather: Span) -> Cause:
    """Return why a gather was neither issued nor refused a slot any earlier."""
    if step.context.depth == 0:
        return Cause.NO_SLOT
    if gather.on_demand and gather.refused == 0:
        return Cause.ISSUED_LATE  # its unit was not prefetched
    if step.context.on_gpu:
        # The host was behind if the GPU computed the next unit as soon as the host issued it.
        after = [span for span in step.iteration.of(*COMPUTE) if span.begin >= gather.issued]
        if after and min(after, key=lambda span: span.begin).lead < BEHIND:
            return Cause.ISSUED_LATE
    return Cause.NO_SLOT


# - Reductions


def _explain_reduction(step: _Step, wait: Span) -> list[Exposure]:
    """Cut the wait into parts by the activity of the lanes of reductions."""
    is_for_all = wait.first < 0
    names = ("all-reduce", "reduce") if is_for_all else ("reduce", "all-reduce")
    lanes = [[span for span in step.lanes[name] if step.is_before(span, wait)] for name in names]
    inside = _at_work(lanes, wait.begin, wait.end)
    if not inside:
        done = [lane[-1] for lane in lanes if lane]
        if not done:
            return [_exposure("reduce", wait, wait, wait.seconds, Cause.UNKNOWN)]
        # The lanes have finished, and the waiter has not woken up yet.
        return [_gap(step, wait, done[0], wait.seconds)]
    result = []
    reached = wait.begin
    for span, begin, end in inside:
        if begin > reached:
            result.append(_gap(step, wait, span, begin - reached))
        result += _while_reducing(step, wait, span, end - begin)
        reached = end
    if wait.end > reached:
        result.append(_gap(step, wait, inside[-1][0], wait.end - reached))
    return result


def _at_work(
    lanes: Sequence[Sequence[Span]], begin: float, end: float
) -> list[tuple[Span, float, float]]:
    """Return the work of lanes between ``begin`` and ``end``, in order.

    While a lane works, the lanes after it do not count.
    """
    if not lanes:
        return []
    result = []
    reached = begin
    for span in lanes[0]:
        low, high = max(span.begin, reached), min(span.end, end)
        if high > low:
            result += [*_at_work(lanes[1:], reached, low), (span, low, high)]
            reached = high
    return result + _at_work(lanes[1:], reached, end)


def _gap(step: _Step, wait: Span, beside: Span, seconds: float) -> Exposure:
    """Return the cause of idle seconds of the lanes of reductions next to span ``beside``."""
    if seconds > PAUSE:
        return _exposure(step.operation(beside), wait, beside, seconds, Cause.ISSUED_LATE)
    return _of_reduction(step, wait, beside, seconds)


def _while_reducing(step: _Step, wait: Span, span: Span, seconds: float) -> list[Exposure]:
    if span.work in OPTIMIZER:
        return [_exposure("optimizer", wait, span, seconds, Cause.OPTIMIZER)]
    late = step.late(span)
    if late is None:
        return [_of_reduction(step, wait, span, seconds)]
    part = min(seconds, late.seconds)
    result = [_exposure(step.operation(span), wait, span, part, step.context.delayed, late.rank)]
    if seconds > part:
        result.append(_of_reduction(step, wait, span, seconds - part))
    return result


def _of_reduction(step: _Step, wait: Span, span: Span, seconds: float) -> Exposure:
    if not step.last_reduced:  # nothing is on the wire
        cause = Cause.COPIES
    else:
        cause = Cause.LAST if span.units in step.last_reduced else Cause.BANDWIDTH
    return _exposure(step.operation(span), wait, span, seconds, cause)


def _exposure(
    operation: str, wait: Span, awaited: Span, seconds: float, cause: Cause, rank: int = -1
) -> Exposure:
    return Exposure(operation, awaited.phase, awaited.units, wait.begin, seconds, cause, rank)
