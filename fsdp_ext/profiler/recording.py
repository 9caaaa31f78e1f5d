"""What a schedule wrote down of its steps (csrc/core/ledger.h), as Python reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

# On which lane's streams work runs; everything else is on the compute stream.
LANES = {
    "cast": "gather",
    "gather": "gather",
    "unpack": "gather",
    "pack": "reduce",
    "reduce": "reduce",
    "hand over": "reduce",
}
# What is on the wire.
WIRES = ("gather", "reduce")
WAITS = ("wait (gather)", "wait (reduction)")
COMPUTE = ("unit forward", "unit backward")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Span:
    """Something that was issued, and when it ran: seconds of ``time.monotonic()``.

    Args:
        work: what; of LANES, WAITS, COMPUTE or PASSES.
        phase: in which it was issued: "forward", "backward" or "other".
        first: number of the unit, or of the bucket's first one in the order of forward; -1 for all.
        last: of the bucket's last one.
        nbytes: of a collective, of all ranks together.
        begin: when it began.
        end: when it ended.
        issued: when the host issued a collective.
        refused: when it was first to be gathered ahead and had no slot; 0: it never was.
        possible: when its slot was free, or its gradients were there; 0: before the iteration.
        lead: seconds from when the host had come to its begin until that was; 0 on the host.
        on_demand: whether a gather was issued when it was needed, and not ahead.
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
        """How long it took."""
        return self.end - self.begin

    @property
    def units(self) -> tuple[int, int]:
        """Its first and last unit."""
        return self.first, self.last


@dataclass(frozen=True)
class Iteration:
    """One forward and its backward, or a forward alone, on one rank.

    Args:
        number: the same on all ranks.
        spans: in order of issue, all of which have ended.
        end: where the next one begins, or the profile ends.
    """

    number: int
    spans: tuple[Span, ...]
    end: float
    _by_work: dict[str, list[Span]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the spans by what they are."""
        for span in self.spans:
            self._by_work.setdefault(span.work, []).append(span)

    def of(self, *works: str) -> list[Span]:
        """Return the spans of such work, each kind in order of issue."""
        return [span for work in works for span in self._by_work.get(work, [])]

    def lane(self, name: str) -> list[Span]:
        """Return what ran on a lane's streams, "gather" or "reduce", by when it began."""
        works = [work for work, lane in LANES.items() if lane == name]
        return sorted(self.of(*works), key=lambda span: span.begin)

    @property
    def begin(self) -> float:
        """When its forward began."""
        return self.of("forward")[0].begin

    @property
    def step(self) -> float:
        """Seconds from its forward's begin to the next one's."""
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        """Seconds that the compute stream waited for communication."""
        return sum(span.seconds for span in self.of(*WAITS))

    @property
    def compute(self) -> float:
        """Seconds of forward and backward without those waits."""
        inside = [
            wait.seconds
            for wait in self.of(*WAITS)
            if any(span.begin <= wait.begin and wait.end <= span.end for span in self.of(*PASSES))
        ]
        return sum(span.seconds for span in self.of(*PASSES)) - sum(inside)

    @property
    def other(self) -> float:
        """Seconds of what is neither: the loss, the optimizer, input."""
        return self.step - self.compute - self.exposed

    @property
    def wire(self) -> float:
        """Seconds of all collectives."""
        return sum(span.seconds for span in self.of(*WIRES))


def copy_rates(iterations: Sequence[Iteration]) -> tuple[float, float]:
    """Return the seconds a byte of what lanes do around the wire, of gathers and of reductions.

    Bytes are those of the collectives, of all ranks together; without any, the rates are 0.
    """

    def rate(wire: str) -> float:
        works = [work for work, lane in LANES.items() if lane == wire and work != wire]
        seconds = sum(span.seconds for one in iterations for span in one.of(*works))
        nbytes = sum(span.nbytes for one in iterations for span in one.of(wire))
        return seconds / nbytes if nbytes else 0.0

    return rate("gather"), rate("reduce")


RawSpan = tuple[str, str, int, int, int, float, float, float, float, float, float, bool]


def read(raw: Sequence[tuple[int, Sequence[RawSpan]]], end: float) -> list[Iteration]:
    """Return the iterations of ``_C.TorchRoot.take_times``.

    One that an exception ended is left out.

    Args:
        raw: what it returned.
        end: when the last one ended, seconds of ``time.monotonic()``.
    """
    whole: list[tuple[int, tuple[Span, ...]]] = []
    for number, raw_spans in raw:
        spans = tuple(_nested([Span(*raw_span) for raw_span in raw_spans]))
        if all(span.end > 0 for span in spans) and any(span.work == "forward" for span in spans):
            whole.append((number, spans))
    begins = {
        number: next(s.begin for s in spans if s.work == "forward") for number, spans in whole
    }
    last = max((number for number, _ in raw), default=0)
    result = []
    for number, spans in whole:
        own_end = max(span.end for span in spans)
        # The next one may be missing, if an exception ended it.
        until = end if number == last else begins.get(number + 1, own_end)
        result.append(Iteration(number, spans, max(until, own_end)))
    return result


def _nested(spans: list[Span]) -> list[Span]:
    """Let units' backwards begin no later than those of the units that they enclose.

    Backward comes to a unit's outputs and to those of what it ends with in any order, since both
    are the same tensors.
    """
    open_spans: list[int] = []
    result = list(spans)
    for place in sorted(
        (place for place, span in enumerate(spans) if span.work == "unit backward"),
        key=lambda place: (spans[place].begin, -spans[place].end),
    ):
        span = result[place]
        open_spans = [other for other in open_spans if result[other].end > span.begin]
        cut = [result[other].begin for other in open_spans if result[other].end < span.end]
        if cut:
            result[place] = replace(span, begin=min(cut))
        open_spans.append(place)
    return result


def merged_intervals(spans: Sequence[Span], gap: float) -> list[tuple[float, float]]:
    """Return when at least one of ``spans``, sorted by begin, ran; pauses up to ``gap`` count."""
    result: list[tuple[float, float]] = []
    for span in spans:
        if result and span.begin - result[-1][1] <= gap:
            result[-1] = (result[-1][0], max(result[-1][1], span.end))
        else:
            result.append((span.begin, span.end))
    return result


def overlap(begin: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    """Return how many seconds of [begin, end] are in ``intervals``, which do not overlap."""
    return sum(max(0.0, min(end, high) - max(begin, low)) for low, high in intervals)


def own_compute(iteration: Iteration) -> Iterator[tuple[Span, float]]:
    """Yield what each unit computed, with its seconds without those that it encloses and waits."""
    spans = sorted(iteration.of(*COMPUTE, *WAITS), key=lambda span: (span.begin, -span.end))
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
