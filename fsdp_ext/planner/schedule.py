"""A model of the schedule: how long a step takes, and how much communication is exposed.

    from fsdp_ext.planner.schedule import Stage, predict
    from fsdp_ext.comm.link import H100_NODE

    layers = [Stage(f"layer {i}", 4e-3, 8e-3, gather_bytes=400 * 10**6, reduce_bytes=800 * 10**6)
              for i in range(32)]
    print(predict(None, layers, H100_NODE).exposed)

Nothing runs. ``predict`` follows the calls that csrc/core/schedule/pipeline.h makes for a chain of
units, with one lane for gathers, one for reductions and, with hybrid sharding, one for all-reduces
over replicas, and advances a clock from event to event. All times are simulated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from fsdp_ext._util.numbers import is_real
from fsdp_ext.comm.link import Link


@dataclass(frozen=True)
class Stage:
    """The units that are gathered, computed and reduced together: a bucket
    (csrc/core/units/bucket.h).

    Args:
        name: name of the bucket or of its unit.
        forward: seconds of compute in forward.
        backward: seconds of compute in backward.
        gather_bytes: size of its all-gather, summed over all ranks. With 0 there is none, and the
            lane only copies.
        reduce_bytes: size of its reduce-scatter, summed over all ranks. With 0 there is none.
        reshards: whether its parameters are freed after forward.
        has_backward: whether backward reaches it. Otherwise it is not gathered again, and
            ``backward`` does not count.
        copy_seconds_gather: seconds of casts and unpacking on the gather lane.
        copy_seconds_reduce: seconds of packing and of writing gradients on the reduce lane.
        gather_messages: number of messages of its gather; each costs one latency.
        reduce_messages: number of messages of its reduction.
        all_reduce_bytes: size of its all-reduce over replicas, of one rank. With 0 there is none.
        reduces_in_place: whether its reduction writes the flat gradient. With replicas, messages
            that do not do so take turns with two outputs.
        update: seconds that an attached optimizer takes for it after its reduction.
    """

    name: str
    forward: float
    backward: float
    gather_bytes: int
    reduce_bytes: int
    reshards: bool = True
    has_backward: bool = True
    copy_seconds_gather: float = 0.0
    copy_seconds_reduce: float = 0.0
    gather_messages: int = 1
    reduce_messages: int = 1
    all_reduce_bytes: int = 0
    reduces_in_place: bool = True
    update: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "name" and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"stage '{self.name}' got {each.name}={value!r}. Pass seconds and bytes of 0 "
                    "or more."
                )


@dataclass(frozen=True)
class PredictedSpan:
    """The work of one lane for one stage, in seconds after the step began.

    ``lane`` is "compute", "gather", "reduce" or, with replicas, "all-reduce". Each stage has a span
    on "compute" in forward and, if it has a backward, one in backward. An update adds one, on
    "compute" or on the lane of the reduction. A reduction has two on "reduce", for its copies and
    for the wire, or with replicas one for each message. Spans of no length are left out.
    """

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """A predicted step, in seconds.

    Args:
        step: the whole step.
        compute: the time of the step if the lanes took no time.
        exposed: the difference of the two.
        wire: how long the lanes work, summed, with copies and updates around the wire.
        spans: the work of each lane, with its times.
    """

    step: float
    compute: float
    exposed: float
    wire: float
    spans: tuple[PredictedSpan, ...]

    @property
    def hidden(self) -> float:
        """The share of communication that is hidden, 0 to 1; 1 if there is none."""
        return 1.0 if self.wire == 0 else max(0.0, 1.0 - self.exposed / self.wire)


def predict(
    root: Stage | None,
    stages: Sequence[Stage],
    link: Link,
    *,
    depth: int = 1,
    slots: int | None = None,
    contention: float = 0.0,
    packs_ahead: bool = False,
    replica_link: Link | None = None,
    updates_on_lane: bool = False,
) -> Prediction:
    """Return how long a training step takes for a chain of stages.

    The rules are those of csrc/core/schedule/pipeline.h once the order is known. Forward gathers
    the root first, which encloses the stages. When forward enters a stage, it issues the gathers of
    the next ``depth`` stages, as long as the ring has free slots (csrc/core/memory/buffer_ring.h).
    A slot is free when its stage's forward has ended. Backward runs the stages in reverse, except
    those without a backward. Stages whose slot has not been taken since forward are still there,
    and the others are gathered again. A stage's reduction is issued when its backward has ended,
    and the root's at the very end. Before each reduction is issued, all updates except the latest
    are finished, and the rest at the end of backward (Note [updates in backward] in
    csrc/core/reduce/unit_update.h). With replicas, each message is all-reduced after its reduction,
    while the next one is reduced (Note [replicas] in csrc/core/reduce/reducer.h). Each lane works
    in order. The step ends when compute and all reductions have ended.

    Compute waits until a stage's gradients are packed, at the latest before the next reduction is
    issued. If the gradients of both stages exceed ReduceMemory::most_gradients together, it waits
    before the next stage's backward (Note [gradient lifetime] in
    csrc/core/reduce/packed_gradients.h). All copies of a reduction count as packing.

    While k of the lanes work, they take the share k * contention from compute. Compute then
    runs at the rate max(0, 1 - k * contention). If k * contention exceeds 1, each lane runs at the
    rate 1 / (k * contention). If the link has ``one_wire``, a gather and a reduction that run at
    the same time have half the rate each, and count as one of the k lanes.

    The host is assumed to keep step with compute, as it does on the CPU. Ahead of a GPU it issues
    gathers sooner, but they wait for their slots; with ``depth + 1`` slots the result is the same.
    Slots count as equally large. In a run, small stages may stay in the ring longer, which saves
    gathers.

    Args:
        root: the stage that encloses the others, or None. It computes after them in forward and
            before them in backward, like a language model's head.
        stages: the stages in the order of forward.
        link: the link of the collectives, which take ``messages * alpha + bytes / beta``. If it
            depends on the number of ranks, pass ``link.over(world_size)``.
        depth: how many gathers are issued ahead of the stage in use.
        slots: slots of the ring; ``depth + 1`` by default.
        contention: seconds of compute that are lost per second in which a lane works, 0 or more.
            From 1 on, compute stands still meanwhile. It is 0 if communication takes nothing from
            compute, as with copy engines. If the core that computes also communicates, as with
            shared memory or gloo and one core per rank, ``python -m bench predict`` fits 0.2 to
            0.9.
        packs_ahead: whether the copies of a reduction overlap the wire of the one before it, as on
            a GPU (Note [packing ahead] in csrc/core/reduce/reducer.h).
        replica_link: the link of all-reduces over replicas, which take ``alpha + 2 * bytes / beta``
            with its figures for reductions. Stages that all-reduce need it.
        updates_on_lane: whether updates follow their reductions on the lane, as on a GPU, or run
            where compute does.

    Raises:
        ValueError: if a number is out of range, or ``replica_link`` is missing.
    """
    slots = depth + 1 if slots is None else slots
    _check_numbers(depth, slots)
    check_contention("predict", contention)
    chain = [*stages] if root is None else [root, *stages]
    gather_cost, reduce_cost = link.costs()
    gathers, wire = _Lane("gather", *gather_cost), _Lane("reduce", *reduce_cost)
    packing = _Lane("reduce", 0.0, math.inf) if packs_ahead else None
    all_reduces = _lane_of_replicas(chain, replica_link)
    lanes = [lane for lane in (gathers, packing, wire, all_reduces) if lane is not None]
    clock = _Clock(lanes, contention, (gathers, wire) if link.one_wire else ())
    reductions = _Reductions(wire, packing, all_reduces, updates_on_lane)
    program = _Program(chain, clock, gathers, reductions, depth, [None] * slots)
    program.run(has_root=root is not None)
    for lane in lanes:
        if lane.jobs:
            clock.wait_for(lane.jobs[-1])
    compute = sum(stage.forward + stage.backward * stage.has_backward for stage in chain)
    compute += 0.0 if updates_on_lane else sum(stage.update for stage in chain)
    return Prediction(
        step=clock.now,
        compute=compute,
        exposed=max(0.0, clock.now - compute),
        wire=sum(lane.busy for lane in lanes),
        spans=tuple(sorted(clock.spans, key=lambda span: (span.begin, span.end))),
    )


def _check_numbers(depth: int, slots: int) -> None:
    if depth < 0 or slots < 1:
        raise ValueError(
            f"predict got depth={depth} and slots={slots}. Pass a depth of 0 or more and at least "
            "one slot; the defaults are 1 and depth + 1."
        )


def check_contention(caller: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a number of 0 or more; the message names ``caller``."""
    if not is_real(value) or value < 0:
        raise ValueError(
            f"{caller} got contention={value!r}. Pass 0 or more; 1 means that compute stands "
            "still while a collective runs."
        )


def _lane_of_replicas(chain: Sequence[Stage], link: Link | None) -> _Lane | None:
    if not any(stage.all_reduce_bytes > 0 for stage in chain):
        return None
    if link is None:
        raise ValueError(
            "predict got stages that all-reduce over replicas, but no replica_link. Pass the link "
            "between replicas."
        )
    return _Lane("all-reduce", *link.costs()[1])


# - Time


@dataclass
class _Job:
    """A collective with the copies around it."""

    name: str
    seconds: float
    after: Sequence[_Job] = ()  # it begins when these have ended
    done: bool = False

    @property
    def may_begin(self) -> bool:
        return all(job.done for job in self.after)


@dataclass(eq=False)
class _Lane:
    """Runs jobs in order, one at a time. A message costs alpha seconds, its bytes 1 / beta each."""

    name: str
    alpha: float
    beta: float
    jobs: deque[_Job] = field(default_factory=deque)
    busy: float = 0.0
    begin: float = 0.0
    left: float | None = None  # seconds of the first job, once it has begun

    def issue(
        self, name: str, messages: int, nbytes: float, copies: float, after: Sequence[_Job] = ()
    ) -> _Job:
        """Append a collective with ``copies`` seconds of copies around it."""
        wire = messages * self.alpha + nbytes / self.beta if nbytes > 0 else 0.0
        job = _Job(name, wire + copies, after)
        self.jobs.append(job)
        self.busy += job.seconds
        return job


@dataclass
class _Clock:
    """Advances time from event to event; an event is the end of a job or of the current compute."""

    lanes: list[_Lane]
    contention: float
    one_wire: Sequence[_Lane]  # the lanes that share its bandwidth
    now: float = 0.0
    spans: list[PredictedSpan] = field(default_factory=list)

    def compute(self, name: str, seconds: float) -> None:
        begin, left = self.now, seconds
        while left > 0:
            left = self._advance(left)
        self.spans.append(PredictedSpan("compute", name, begin, self.now))

    def wait_for(self, job: _Job) -> None:
        while not job.done:
            self._advance(math.inf)

    def _advance(self, compute: float) -> float:
        """Advance to the next event; return the remaining seconds of ``compute``."""
        at_work = [lane for lane in self.lanes if lane.jobs and lane.jobs[0].may_begin]
        for lane in at_work:
            if lane.left is None:
                lane.begin, lane.left = self.now, lane.jobs[0].seconds
        sharing = max(1, sum(lane in self.one_wire for lane in at_work))
        taken = (len(at_work) - sharing + 1) * self.contention if at_work else 0.0
        rate = max(0.0, 1.0 - taken)
        # How many times longer each lane takes than alone.
        slower = [max(1.0, taken) * (sharing if lane in self.one_wire else 1) for lane in at_work]
        # The first lane to end has exactly this much left, so it ends without a remainder.
        ends = [(lane.left or 0.0) * by for lane, by in zip(at_work, slower, strict=True)]
        computed = compute / rate if rate > 0 else math.inf
        passed = min([computed, *ends])
        self.now += passed
        for lane, by, end in zip(at_work, slower, ends, strict=True):
            lane.left = (end - passed) / by
            if end == passed:
                job = lane.jobs.popleft()
                job.done, lane.left = True, None
                if job.seconds > 0:
                    self.spans.append(PredictedSpan(lane.name, job.name, lane.begin, self.now))
        return 0.0 if passed == computed else max(0.0, compute - passed * rate)


# - The schedule's calls


def _gradient_bytes(stage: Stage) -> int:
    """Return the size of a stage's gradients before they are reduced, in the reduction's dtype."""
    return stage.reduce_bytes or stage.all_reduce_bytes


def _is_reduced(stage: Stage) -> bool:
    """Return whether there is anything to pack, send or copy."""
    return _gradient_bytes(stage) > 0 or stage.copy_seconds_reduce > 0


@dataclass
class _Reductions:
    """The lanes of reductions, of packing ahead, and of replicas, if any."""

    wire: _Lane
    packing: _Lane | None
    all_reduces: _Lane | None
    updates_on_lane: bool
    # Messages take turns with two inputs, all-reduces with two outputs.
    last: list[_Job] = field(default_factory=list)
    outputs: list[_Job] = field(default_factory=list)

    def issue(self, stage: Stage) -> tuple[_Job | None, _Job | None]:
        """Issue a reduction and the update on its lane; return packing and the last of the jobs."""
        packed, last = self._reduce(stage) if _is_reduced(stage) else (None, None)
        if self.updates_on_lane and stage.update > 0:
            lane = self.all_reduces if stage.all_reduce_bytes > 0 else self.wire
            last = (lane or self.wire).issue(stage.name, 0, 0, stage.update)
        return packed, last

    def _reduce(self, stage: Stage) -> tuple[_Job, _Job]:
        free = self.last[-2:-1]  # the message that had this input before
        packing = self.packing or self.wire
        packed = packing.issue(stage.name, 0, 0, stage.copy_seconds_reduce, free)
        if self.all_reduces is not None and stage.all_reduce_bytes > 0:
            return packed, self._issue_with_all_reduces(self.all_reduces, stage, packed)
        messages, nbytes = stage.reduce_messages, stage.reduce_bytes
        self.last.append(self.wire.issue(stage.name, messages, nbytes, 0.0, [packed]))
        return packed, self.last[-1]

    def _issue_with_all_reduces(self, all_reduces: _Lane, stage: Stage, packed: _Job) -> _Job:
        """Issue each message of a reduction, and its all-reduce behind it."""
        count = stage.reduce_messages
        for _ in range(count):
            needs_output = not stage.reduces_in_place
            free = self.outputs[-2:-1] if needs_output else []
            nbytes = stage.reduce_bytes / count
            reduced = self.wire.issue(stage.name, 1, nbytes, 0.0, [packed, *free])
            nbytes = 2 * stage.all_reduce_bytes / count
            summed = all_reduces.issue(stage.name, 1, nbytes, 0.0, [reduced])
            if needs_output:
                self.outputs.append(summed)
        self.last.append(reduced)
        return summed


@dataclass
class _Program:
    """One forward and one backward: issues jobs, computes, and waits for jobs."""

    stages: Sequence[Stage]  # in the order in which forward enters them
    clock: _Clock
    gathers: _Lane
    reductions: _Reductions
    depth: int
    # The free slots of the ring, the oldest first: the stages whose parameters are still in them.
    slots: list[int | None]
    unsharded: dict[int, _Job | None] = field(default_factory=dict)  # gathers of unsharded stages
    done: dict[int, _Job] = field(default_factory=dict)  # the last gather of each stage
    overflow: set[int] = field(default_factory=set)  # stages that were gathered without a slot
    updated: deque[tuple[Stage, _Job | None]] = field(default_factory=deque)  # updates in flight
    packed: tuple[Stage, _Job] | None = None  # the last packing, if compute has not waited for it

    def run(self, has_root: bool) -> None:
        """Run the stages, the first of which encloses the others if ``has_root``."""
        numbers = range(len(self.stages))
        root, below = numbers[:has_root], numbers[has_root:]
        for position, number in enumerate(numbers):
            self._enter(number, numbers[position + 1 :])
            if number in below:
                self._forward(number)
        for number in root:
            self._forward(number)
        order = [n for n in (*root, *reversed(below)) if self.stages[n].has_backward]
        for position, number in enumerate(order):
            self._enter(number, order[position + 1 :])
            self.clock.compute(self.stages[number].name, self.stages[number].backward)
            if number in below:
                self._reduce(number)
        for number in root:
            if number in order:
                self._reduce(number)
        self._finish_updates(most=0)

    def _forward(self, number: int) -> None:
        self.clock.compute(self.stages[number].name, self.stages[number].forward)
        self._leave(number)

    def _reduce(self, number: int) -> None:
        stage = self.stages[number]
        if _is_reduced(stage):
            self._wait_for_packing()
        self._finish_updates(most=1)
        packed, last = self.reductions.issue(stage)
        if packed is not None:
            self.packed = (stage, packed)
        if stage.update > 0:
            self.updated.append((stage, last))
        self._leave(number)

    @cached_property
    def _most_gradients(self) -> int:
        """``ReduceMemory::most_gradients``."""
        nbytes = sorted(filter(None, map(_gradient_bytes, self.stages)), reverse=True)
        return max(nbytes[0], 2 * nbytes[len(nbytes) // 4]) if nbytes else 0

    def _make_room(self, number: int) -> None:
        """``PackedGradients::make_room``."""
        if self.packed is not None:
            both = _gradient_bytes(self.packed[0]) + _gradient_bytes(self.stages[number])
            if both > self._most_gradients:
                self._wait_for_packing()

    def _wait_for_packing(self) -> None:
        """``PackedGradients::free``."""
        if self.packed is not None:
            self.clock.wait_for(self.packed[1])
            self.packed = None

    def _finish_updates(self, most: int) -> None:
        """``Reducer::finish_updates``."""
        while len(self.updated) > most:
            stage, last = self.updated.popleft()
            if last is not None:
                self.clock.wait_for(last)
            if not self.reductions.updates_on_lane:
                self.clock.compute(stage.name, stage.update)

    def _enter(self, number: int, ahead: Sequence[int]) -> None:
        """Gather this stage and the next ones: ``pre_forward`` and ``pre_backward``."""
        self._gather(number, on_demand=True)
        for target in ahead[: self.depth]:
            if not self._gather(target, on_demand=False):
                break
        self._make_room(number)
        gather = self.unsharded[number]
        if gather is not None:
            self.clock.wait_for(gather)

    def _gather(self, number: int, on_demand: bool) -> bool:
        """Gather a sharded stage; return False if no slot is free (``Gatherer::unshard``)."""
        stage = self.stages[number]
        if number in self.unsharded:
            return True
        if stage.gather_bytes == 0 and stage.copy_seconds_gather == 0:
            self.unsharded[number] = None
            return True
        if stage.reshards and number in self.slots:  # still there
            self.slots.remove(number)
            self.unsharded[number] = self.done[number]
            return True
        if stage.reshards and self.slots:
            self.slots.pop(0)
        elif stage.reshards and on_demand:
            self.overflow.add(number)
        elif stage.reshards:
            return False
        job = self.gathers.issue(
            stage.name, stage.gather_messages, stage.gather_bytes, stage.copy_seconds_gather
        )
        self.unsharded[number] = self.done[number] = job
        return True

    def _leave(self, number: int) -> None:
        if self.stages[number].reshards and self.unsharded.pop(number) is not None:
            if number in self.overflow:
                self.overflow.remove(number)
            else:
                self.slots.append(number)
