"""Spans and iterations: the records of the C++ ledger (csrc/core/record/ledger.h) for each step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# The lane whose streams run each kind of work. All other work is on the compute stream. With
# replicas, "finish reduction" and "update" are on the lane "all-reduce": Iteration.lane_of.
LANES = {
    "cast": "gather",
    "gather": "gather",
    "group gather": "gather",  # of a smaller group: csrc/core/gather/bucket_gather.h
    "unpack": "gather",
    "keep": "gather",
    "pack": "reduce",
    "reduce": "reduce",
    "all-reduce": "all-reduce",
    "finish reduction": "reduce",
    "update": "reduce",  # of an attached optimizer on a GPU
}
# WIRES are the lanes, and COLLECTIVES the kinds of work on the wire.
WIRES = ("gather", "reduce", "all-reduce")
COLLECTIVES = ("gather", "group gather", "reduce", "all-reduce")
WAITS = ("wait (gather)", "wait (reduction)")
# The optimizer's work. "step" is on the compute stream: step(), or on the host an update of an
# attached optimizer.
OPTIMIZER = ("update", "step")
COMPUTE = ("unit forward", "unit backward")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Span:
    """One piece of work and when it ran. Times are seconds of ``time.monotonic()``.

    Args:
        work: the kind of work: one of LANES, WAITS, OPTIMIZER, COMPUTE or PASSES.
        phase: the phase that issued it: "forward", "backward" or "other".
        first: number of the unit, or of the bucket's first unit in forward order; -1 for all units.
        last: number of the bucket's last unit.
        nbytes: size of a collective, summed over the ranks that shard the model or, for a group
            gather, over the ranks of the group; of an all-reduce over replicas, that of one rank;
            else 0.
        begin: when it began.
        end: when it ended.
        issued: when the host issued the collective.
        refused: when a prefetch of it first found no free slot; 0 if that never happened.
        possible: the earliest time it could have begun: when its slot was free, or when its
            gradients were complete; 0 if that was before the iteration.
        lead: seconds from the host issuing the work to the device beginning it; 0 on the CPU.
        on_demand: whether a gather was issued only when its unit needed it, without prefetch.
    """

    work: str
    phase: str
    first: int
    last: int
    nbytes: int
    begin: float
    end: float
    issued: float = 0.0
    refused: float = 0.0
    possible: float = 0.0
    lead: float = 0.0
    on_demand: bool = False

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.begin

    @property
    def units(self) -> tuple[int, int]:
        """Numbers of its first and its last unit."""
        return self.first, self.last


@dataclass(frozen=True)
class Iteration:
    """One forward and its backward, or a forward alone, on one rank.

    Args:
        number: the iteration's number, the same on all ranks.
        spans: all spans, each of which has ended, in order of issue.
        end: when the next iteration began, or when the profile ended.
    """

    number: int
    spans: tuple[Span, ...]
    end: float
    _by_work: dict[str, list[Span]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Group the spans by their kind of work."""
        for span in self.spans:
            self._by_work.setdefault(span.work, []).append(span)

    def of(self, *works: str) -> list[Span]:
        """Return the spans of these kinds of work, each kind in order of issue."""
        return [span for work in works for span in self._by_work.get(work, [])]

    def lane_of(self, work: str) -> str | None:
        """Return the lane whose streams run this kind of work; None for the compute stream."""
        if work in ("finish reduction", "update") and self.of("all-reduce"):
            return "all-reduce"
        return LANES.get(work)

    def lane(self, name: str) -> list[Span]:
        """Return the spans on the streams of one of WIRES, sorted by their begin."""
        works = [work for work in LANES if self.lane_of(work) == name]
        return sorted(self.of(*works), key=lambda span: span.begin)

    @property
    def begin(self) -> float:
        """When forward began."""
        return self.of("forward")[0].begin

    @property
    def step(self) -> float:
        """Seconds from the begin of forward to the begin of the next forward."""
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        """Seconds that the compute stream waited for communication, or for updates on a lane."""
        return sum(span.seconds for span in self.of(*WAITS))

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer on the compute stream."""
        return sum(span.seconds for span in self.of("step"))

    @property
    def compute(self) -> float:
        """Seconds of forward and backward, without waits and the optimizer."""
        inside = [
            pause.seconds
            for pause in self.of(*WAITS, "step")
            if any(span.begin <= pause.begin and pause.end <= span.end for span in self.of(*PASSES))
        ]
        return sum(span.seconds for span in self.of(*PASSES)) - sum(inside)

    @property
    def other(self) -> float:
        """Seconds of everything else: the loss, the input pipeline."""
        return self.step - self.compute - self.exposed - self.optimizer

    @property
    def wire(self) -> float:
        """Seconds that collectives took, summed."""
        return sum(span.seconds for span in self.of(*COLLECTIVES))


def copy_rates(iterations: Sequence[Iteration]) -> tuple[float, float]:
    """Return the seconds per byte of the casts and copies around gathers and around reductions.

    Bytes are those of the collectives, summed over all ranks. A rate without bytes is 0.
    """

    def rate(wire: str) -> float:
        works = [work for work, lane in LANES.items() if lane == wire]
        copies = [work for work in works if work not in (*COLLECTIVES, *OPTIMIZER)]
        seconds = sum(span.seconds for one in iterations for span in one.of(*copies))
        nbytes = sum(span.nbytes for one in iterations for span in one.of(*works))
        return seconds / nbytes if nbytes else 0.0

    return rate("gather"), rate("reduce")


def read_iterations(
    raw: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], end: float
) -> list[Iteration]:
    """Return the iterations in the result of ``_C.TorchRoot.take_times``.

    Iterations that an exception ended are left out.

    Args:
        raw: the number of each iteration and the fields of its spans, as ``take_times`` returned
            them.
        end: when the last iteration ended, in seconds of ``time.monotonic()``.
    """
    whole: list[tuple[int, tuple[Span, ...]]] = []
    for number, timed in raw:
        spans = tuple(_without_closures(_nested([Span(**fields) for fields in timed])))
        if all(span.end > 0 for span in spans) and any(span.work == "forward" for span in spans):
            whole.append((number, spans))
    begins = {
        number: next(s.begin for s in spans if s.work == "forward") for number, spans in whole
    }
    last = max((number for number, _ in raw), default=0)
    result = []
    for number, spans in whole:
        own_end = max(span.end for span in spans)
        # The next iteration may be missing: an exception may have ended it.
        until = end if number == last else begins.get(number + 1, own_end)
        result.append(Iteration(number, spans, max(until, own_end)))
    return result


def _nested(spans: list[Span]) -> list[Span]:
    """Let the backward of each unit begin no later than that of the units inside it.

    A unit and the last unit inside it have the same output tensors, so autograd may reach the
    hooks of either one first.
    """
    open_spans: list[int] = []
    result = list(spans)
    for index in sorted(
        (index for index, span in enumerate(spans) if span.work == "unit backward"),
        key=lambda index: (spans[index].begin, -spans[index].end),
    ):
        span = result[index]
        open_spans = [other for other in open_spans if result[other].end > span.begin]
        cut = [result[other].begin for other in open_spans if result[other].end < span.end]
        if cut:
            result[index] = replace(span, begin=min(cut))
        open_spans.append(index)
    return result


def _without_closures(spans: list[Span]) -> list[Span]:
    """Leave out each step() whose closure ran backward, which would count its time twice."""
    backwards = [span for span in spans if span.work == "backward"]
    return [
        span
        for span in spans
        if span.work != "step"
        or not any(span.begin <= inner.begin and inner.end <= span.end for inner in backwards)
    ]


def merged_intervals(spans: Sequence[Span], gap: float) -> list[tuple[float, float]]:
    """Merge ``spans``, sorted by begin, into intervals that pauses of over ``gap`` s separate."""
    result: list[tuple[float, float]] = []
    for span in spans:
        if result and span.begin - result[-1][1] <= gap:
            result[-1] = (result[-1][0], max(result[-1][1], span.end))
        else:
            result.append((span.begin, span.end))
    return result


def overlap(begin: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    """Return how many seconds of [begin, end] lie in ``intervals``, as of merged_intervals."""
    first = bisect.bisect_right(intervals, begin, key=lambda interval: interval[1])
    last = bisect.bisect_left(intervals, end, key=lambda interval: interval[0])
    return sum(min(end, high) - max(begin, low) for low, high in intervals[first:last])


def wire_seconds(iteration: Iteration, lane: str, one_wire: bool) -> list[float]:
    """Return how long each gather or each reduction would take with the wire for itself.

    Args:
        iteration: one iteration on one rank.
        lane: "gather", "reduce", or "all-reduce", which shares no wire.
        one_wire: whether both share the bandwidth (``Link.one_wire``). Then the time during which
            both travel counts half.
    """
    spans = iteration.of(lane)
    if not one_wire or lane == "all-reduce":
        return [span.seconds for span in spans]
    other = sorted(iteration.of("reduce" if lane == "gather" else "gather"), key=lambda s: s.begin)
    beside = merged_intervals(other, gap=0.0)
    return [span.seconds - overlap(span.begin, span.end, beside) / 2 for span in spans]


def own_compute(iteration: Iteration) -> Iterator[tuple[Span, float]]:
    """Yield each unit's compute spans, each with its seconds outside of other spans."""
    spans = sorted(iteration.of(*COMPUTE, *WAITS, "step"), key=lambda span: (span.begin, -span.end))
    open_spans: list[tuple[Span, float]] = []
    done: list[tuple[Span, float]] = []
    for span in spans:
        while open_spans and open_spans[-1][0].end <= span.begin:
            done.append(open_spans.pop())
        if open_spans:
            parent, own = open_spans.pop()
            open_spans.append((parent, own - min(span.seconds, parent.end - span.begin)))
        open_spans.append((span, span.seconds))
    done += reversed(open_spans)
    for span, own in done:
        if span.work in COMPUTE:
            yield span, max(own, 0.0)
