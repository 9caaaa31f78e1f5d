"""What a step takes, and what of its communication shows: the schedule as arithmetic.

    from fsdp_ext.planner.schedule import Stage, predict
    from fsdp_ext.comm.link import H100_NODE

    layers = [Stage(f"layer {i}", 4e-3, 8e-3, gather_bytes=400 * 10**6, reduce_bytes=800 * 10**6)
              for i in range(32)]
    print(predict(None, layers, H100_NODE).exposed)

Nothing runs: ``predict`` goes through the calls that csrc/core/pipeline.h makes of a chain of
units, with one lane for gathers and one for reductions, and advances time from event to event.
Every time that comes out of it is a simulated one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from fsdp_ext.comm.link import Link


@dataclass(frozen=True)
class Stage:
    """What is gathered, computed and reduced together: a bucket (csrc/core/bucket.h).

    Args:
        name: of the bucket, or of its unit.
        forward: seconds that its forward computes.
        backward: seconds that its backward computes.
        gather_bytes: that its all-gather carries, of all ranks together; 0: there is none, and
            the lane does its copies alone.
        reduce_bytes: that its reduce-scatter carries, of all ranks together; 0: likewise.
        reshards: whether its parameters are freed after forward.
        copy_seconds_gather: of casts and unpacking, which the gathers' lane does around the wire.
        copy_seconds_reduce: of packing and handing over, which the reductions' lane does.
        gather_messages: that its gather travels as, one latency each.
        reduce_messages: that its reduction travels as.

    Raises:
        ValueError: if a number is negative.
    """

    name: str
    forward: float
    backward: float
    gather_bytes: int
    reduce_bytes: int
    reshards: bool = True
    copy_seconds_gather: float = 0.0
    copy_seconds_reduce: float = 0.0
    gather_messages: int = 1
    reduce_messages: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"stage '{self.name}' expects {field.name} of 0 or more but got {value!r}; "
                    "give seconds and bytes"
                )


@dataclass(frozen=True)
class Span:
    """What one lane did for one stage, in seconds after the step began.

    ``lane`` is "compute", "gather" or "reduce"; a stage has two spans of the first one, forward's
    and backward's.
    """

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds.

    ``step`` is the whole of it; ``compute`` what it would take if communication took no time;
    ``exposed`` the difference of the two; ``wire`` how long the two lanes are at work, together,
    with the copies around the wire.
    """

    step: float
    compute: float
    exposed: float
    wire: float
    spans: tuple[Span, ...]

    @property
    def hidden(self) -> float:
        """The part of communication that does not show, 0 to 1; 1 where there is none."""
        return 1.0 if self.wire == 0 else max(0.0, 1.0 - self.exposed / self.wire)


def predict(
    root: Stage | None,
    stages: Sequence[Stage],
    link: Link,
    *,
    depth: int = 1,
    slots: int | None = None,
    contention: float = 0.0,
    launch: float = 0.0,
    root_begins: bool = True,
) -> Prediction:
    """Return how long a step takes that trains a chain of stages.

    The rules are those of csrc/core/pipeline.h once the order is known. Forward gathers the root
    first, which encloses the stages. Where forward enters a stage, the gathers of the next
    ``depth`` ones are issued, as far as the ring has slots (csrc/core/buffer_ring.h); a slot is
    free when its stage's forward has ended. Backward goes in reverse; stages that nobody has taken
    the slot of since forward are there still, the others are gathered again. A stage's reduction
    is issued when its backward has ended, the root's at the end of all. Each lane works in order.
    The step ends when compute and all reductions have ended.

    While k of the two lanes are at work, they take k * contention of what computes: compute goes on
    at the rate max(0, 1 - k * contention), and where that is not enough for the lanes themselves,
    each goes on at the rate 1 / (k * contention).

    The host is taken to run along with compute, as it does where compute is on the host. Ahead of a
    GPU it issues gathers sooner, but they wait for their slots, and with ``depth + 1`` slots that
    comes to the same.

    Args:
        root: what encloses the stages, or None. Its own compute is behind that of the stages in
            forward and before it in backward, as a language model's head is.
        stages: in the order that forward runs them.
        link: what collectives take: ``messages * alpha + bytes / beta``. Of a link that depends on
            the number of ranks, pass ``link.over(world_size)``.
        depth: gathers that are issued ahead of the stage in use.
        slots: of the ring; ``depth + 1`` by default.
        contention: what compute loses of the time in which a lane is at work, 0 to 1. 0 where
            communication takes nothing from compute, such as copy engines; about 1 where the core
            that computes has to do it, such as shared memory or gloo between ranks of a core each.
        launch: seconds that the host takes for each stage, in forward and again in backward, on top
            of what it computes.
        root_begins: whether some of the root's parameters, an embedding's, say, are used before the
            stages, so that their gradients come last; else its reduction is issued before theirs.

    Raises:
        ValueError: if a number is out of range.
    """
    slots = depth + 1 if slots is None else slots
    if depth < 0 or slots < 1:
        raise ValueError(
            f"predict expects a depth of 0 or more and at least one slot but got depth={depth}, "
            f"slots={slots}; the defaults are 1 and depth + 1"
        )
    if not (math.isfinite(contention) and contention >= 0):
        raise ValueError(
            f"predict expects a contention of 0 or more but got {contention!r}; 1 means that "
            "compute stands still while a collective runs"
        )
    if not (math.isfinite(launch) and launch >= 0):
        raise ValueError(
            f"predict expects a launch of 0 s or more but got {launch!r}; 20e-6 is 20 us"
        )
    chain = [*stages] if root is None else [root, *stages]
    lanes = {"gather": _Lane("gather"), "reduce": _Lane("reduce")}
    program = _Program(chain, root is not None, root_begins, link, lanes, depth, slots)
    clock = _Clock(list(lanes.values()), contention)
    for task in program.run(launch):
        if isinstance(task, _Compute):
            clock.compute(task)
        else:
            clock.wait_for(task)
    for lane in lanes.values():
        clock.drain(lane)
    compute = sum(stage.forward + stage.backward + 2 * launch for stage in chain)
    return Prediction(
        step=clock.now,
        compute=compute,
        exposed=max(0.0, clock.now - compute),
        wire=sum(lane.busy for lane in lanes.values()),
        spans=tuple(sorted(clock.spans, key=lambda span: (span.begin, span.end))),
    )


# - Time


@dataclass
class _Job:
    """A collective with the copies around it."""

    name: str
    seconds: float
    done: bool = False


@dataclass(frozen=True)
class _Compute:
    """Work of the compute lane; launches have no name."""

    name: str
    seconds: float


class _Lane:
    """Jobs in order, one at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: deque[_Job] = deque()
        self.busy = 0.0
        self.begin = 0.0
        self.left: float | None = None  # of the first job, once it has begun

    def issue(self, job: _Job) -> _Job:
        self.jobs.append(job)
        self.busy += job.seconds
        return job


class _Clock:
    """Advances time to the next event: a job or the compute at hand has ended."""

    def __init__(self, lanes: list[_Lane], contention: float) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._lanes = lanes
        self._contention = contention

    def compute(self, task: _Compute) -> None:
        begin, left = self.now, task.seconds
        while left > 0:
            left = self._advance(left)
        if task.name:
            self.spans.append(Span("compute", task.name, begin, self.now))

    def wait_for(self, job: _Job) -> None:
        while not job.done:
            self._advance(math.inf)

    def drain(self, lane: _Lane) -> None:
        while lane.jobs:
            self._advance(math.inf)

    def _advance(self, compute: float) -> float:
        """Go to the next event; return what is left of so many seconds of compute."""
        at_work = self._begin_jobs()
        taken = len(at_work) * self._contention
        rate = max(0.0, 1.0 - taken)
        lane_rate = 1.0 if taken <= 1 else 1.0 / taken
        # Each is left as long as it takes, so that the first one ends without a remainder.
        ends = [lane.left / lane_rate for lane in at_work if lane.left is not None]
        computed = compute / rate if rate > 0 else math.inf
        passed = min([computed, *ends])
        self.now += passed
        for lane, end in zip(at_work, ends, strict=True):
            lane.left = (end - passed) * lane_rate
            if end == passed:
                self._end_job(lane)
        return 0.0 if passed == computed else max(0.0, compute - passed * rate)

    def _begin_jobs(self) -> list[_Lane]:
        at_work = [lane for lane in self._lanes if lane.jobs]
        for lane in at_work:
            if lane.left is None:
                lane.begin, lane.left = self.now, lane.jobs[0].seconds
        return at_work

    def _end_job(self, lane: _Lane) -> None:
        job = lane.jobs.popleft()
        job.done = True
        self.spans.append(Span(lane.name, job.name, lane.begin, self.now))
        lane.left = None


# - The schedule's calls


class _Ring:
    """Which stages have slots, by number, and which of them are still in released ones."""

    def __init__(self, slots: int) -> None:
        self._free: list[int | None] = [None] * slots  # contents, longest released first
        self._overflow: set[int] = set()

    def take_back(self, stage: int) -> bool:
        if stage not in self._free:
            return False
        self._free.remove(stage)
        return True

    def take(self, stage: int, on_demand: bool) -> bool:
        if self._free:
            self._free.pop(0)
        elif on_demand:
            self._overflow.add(stage)
        else:
            return False
        return True

    def release(self, stage: int) -> None:
        if stage in self._overflow:
            self._overflow.remove(stage)
        else:
            self._free.append(stage)


class _Program:
    """One forward and backward: issues jobs and says what compute does and waits for in between.

    Args:
        chain: in the order that forward enters them.
        has_root: whether the first one encloses the others.
        root_begins: whether its gradients are complete only at the end of backward.
    """

    def __init__(
        self,
        chain: Sequence[Stage],
        has_root: bool,
        root_begins: bool,
        link: Link,
        lanes: dict[str, _Lane],
        depth: int,
        slots: int,
    ) -> None:
        self._chain = chain
        self._has_root = has_root
        self._root_begins = root_begins
        self._costs = link.costs()
        self._lanes = lanes
        self._depth = depth
        self._ring = _Ring(slots)
        self._unsharded: dict[int, _Job | None] = {}  # with their gathers
        self._done: dict[int, _Job] = {}  # the last gather of each

    def run(self, launch: float) -> Iterator[_Compute | _Job]:
        numbers = range(len(self._chain))
        root, below = numbers[: self._has_root], numbers[self._has_root :]

        def forward(number: int) -> _Compute:
            return _Compute(self._chain[number].name, self._chain[number].forward)

        def backward(number: int) -> _Compute:
            return _Compute(self._chain[number].name, self._chain[number].backward)

        for position, number in enumerate(numbers):
            yield from self._enter(number, numbers[position + 1 :], launch)
            if number in below:
                yield forward(number)
                self._leave(number)
        for number in root:
            yield forward(number)
            self._leave(number)
        order = [*root, *reversed(below)]
        for position, number in enumerate(order):
            yield from self._enter(number, order[position + 1 :], launch)
            yield backward(number)
            if number in below or not self._root_begins:
                self._reduce(number)
            if number in below:
                self._leave(number)
        for number in root:
            if self._root_begins:
                self._reduce(number)
            self._leave(number)

    def _enter(self, number: int, ahead: Sequence[int], launch: float) -> Iterator[_Compute | _Job]:
        """Gather what is needed now and next: ``pre_forward``, ``pre_backward``."""
        yield _Compute("", launch)
        self._bring(number, on_demand=True)
        for target in ahead[: self._depth]:
            if not self._bring(target, on_demand=False):
                break
        gather = self._unsharded[number]
        if gather is not None:
            yield gather

    def _bring(self, number: int, on_demand: bool) -> bool:
        """Return False where no slot is free: ``Gatherer::unshard``."""
        stage = self._chain[number]
        if number in self._unsharded:
            return True
        if stage.gather_bytes == 0 and stage.copy_seconds_gather == 0:
            self._unsharded[number] = None
            return True
        if stage.reshards and self._ring.take_back(number):
            self._unsharded[number] = self._done[number]
            return True
        if stage.reshards and not self._ring.take(number, on_demand):
            return False
        seconds = self._wire(0, stage.gather_messages, stage.gather_bytes)
        job = _Job(stage.name, seconds + stage.copy_seconds_gather)
        self._unsharded[number] = self._done[number] = self._lanes["gather"].issue(job)
        return True

    def _reduce(self, number: int) -> None:
        stage = self._chain[number]
        if stage.reduce_bytes > 0 or stage.copy_seconds_reduce > 0:
            seconds = self._wire(1, stage.reduce_messages, stage.reduce_bytes)
            self._lanes["reduce"].issue(_Job(stage.name, seconds + stage.copy_seconds_reduce))

    def _wire(self, lane: int, messages: int, nbytes: int) -> float:
        alpha, beta = self._costs[lane]
        return messages * alpha + nbytes / beta if nbytes > 0 else 0.0

    def _leave(self, number: int) -> None:
        if self._chain[number].reshards and self._unsharded.pop(number) is not None:
            self._ring.release(number)
