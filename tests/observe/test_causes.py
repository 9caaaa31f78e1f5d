"""The causes of exposed communication, found in steps whose times are written out in ms."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_ext.profiler.causes import (
    Cause,
    Context,
    Exposure,
    Lateness,
    explain,
    typical_seconds,
)
from fsdp_ext.profiler.recording import Iteration, Span, overlap
from fsdp_ext.profiler.result import Recording
from fsdp_ext.profiler.rows import rows_of, summarise
from fsdp_ext.profiler.slowdown import slowdown

MS = 1e-3
START = 1000.0  # seconds, the arbitrary origin of the clock


class Step:
    """A step that is built span by span."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.spans: list[Span] = []

    def add(self, work: str, phase: str, units: Any, begin: float, end: float, **more: Any) -> Step:
        first, last = (units, units) if isinstance(units, int) else units
        for name in ("issued", "refused", "possible"):
            if name in more:
                more[name] = START + more[name] * MS
        span = Span(
            work,
            phase,
            first,
            last,
            more.pop("nbytes", 0),
            START + begin * MS,
            START + end * MS,
            **more,
        )
        self.spans.append(span)
        return self

    def gather(self, unit: Any, begin: float, end: float, **more: Any) -> Step:
        more.setdefault("issued", begin)
        return self.add("gather", "forward", unit, begin, end, nbytes=1000, **more)

    def reduce(self, unit: Any, begin: float, end: float, **more: Any) -> Step:
        more.setdefault("issued", begin)
        return self.add("reduce", "backward", unit, begin, end, nbytes=1000, **more)

    def all_reduce(self, unit: Any, begin: float, end: float, **more: Any) -> Step:
        more.setdefault("issued", begin)
        return self.add("all-reduce", "backward", unit, begin, end, nbytes=500, **more)

    def wait(self, unit: Any, begin: float, end: float) -> Step:
        return self.add("wait (gather)", "forward", unit, begin, end)

    def wait_reduced(self, begin: float, end: float) -> Step:
        return self.add("wait (reduction)", "backward", -1, begin, end)

    def forward(self, unit: int, begin: float, end: float, lead: float = 0.0) -> Step:
        """Build a step. ``lead`` is how many milliseconds the host was ahead of the GPU."""
        return self.add("unit forward", "forward", unit, begin, end, lead=lead * MS)

    def passes(self, *, forward: float, backward: float | None = None) -> Step:
        """Forward begins at 0 and ends at ``forward``; backward follows at once."""
        self.spans.insert(0, Span("forward", "forward", -1, -1, 0, START, START + forward * MS))
        if backward is not None:
            begin, end = START + forward * MS, START + backward * MS
            self.spans.insert(1, Span("backward", "backward", -1, -1, 0, begin, end))
        return self

    def end(self, at: float = 100.0) -> Iteration:
        return Iteration(self.number, tuple(self.spans), START + at * MS)


def verdict(
    iteration: Iteration,
    depth: int = 1,
    on_gpu: bool = False,
    late: dict[tuple[int, int], Lateness] | None = None,
    typical: dict[tuple[str, int], float] | None = None,
) -> dict[Cause, float]:
    """Return milliseconds by cause. They add up to the exposed time."""
    exposures = explain(iteration, Context(depth, on_gpu, typical or {}, late or {}))
    assert sum(e.seconds for e in exposures) == pytest.approx(iteration.exposed)
    result: dict[Cause, float] = {}
    for exposure in exposures:
        result[exposure.cause] = result.get(exposure.cause, 0.0) + exposure.seconds / MS
    return {cause: ms for cause, ms in result.items() if ms > 1e-6}


def first_unit() -> Step:
    """The root and the first unit below it are gathered, and that unit computes until 10."""
    step = Step().gather(0, 0, 1).gather(1, 1, 2, issued=0)
    return step.wait(0, 0, 1).forward(0, 1, 40).wait(1, 1, 2).forward(1, 2, 10)


def test_nothing_hides_the_first_gathers() -> None:
    assert verdict(first_unit().passes(forward=40).end()) == {Cause.FIRST: pytest.approx(2)}


def test_gathers_ahead_of_forward_were_issued_in_the_iteration_before() -> None:
    before = Step()
    for unit in (0, 1):
        before.add("gather", "other", unit, -4, 3 + unit, nbytes=1000, issued=START - 4 * MS)
    step = Step().wait(0, 0, 3).forward(0, 3, 40).wait(1, 3, 4).forward(1, 4, 10)
    iteration = step.passes(forward=40).end()
    for known, cause in ((None, Cause.UNKNOWN), (before.end(at=0), Cause.AHEAD)):
        exposures = explain(iteration, Context(1, False, {}, {}), known)
        assert [(e.cause, e.units, e.seconds / MS) for e in exposures] == [
            (cause, (0, 0), pytest.approx(3)),
            (cause, (1, 1), pytest.approx(1)),
        ]


def test_a_lane_that_never_paused_is_slower_than_the_compute() -> None:
    step = first_unit().gather(2, 2, 16, issued=2).wait(2, 10, 16).forward(2, 16, 20)
    assert verdict(step.passes(forward=40).end()) == {
        Cause.FIRST: pytest.approx(2),
        Cause.BANDWIDTH: pytest.approx(6),
    }


def test_a_gather_that_was_refused_a_slot_could_have_come_earlier() -> None:
    step = first_unit().gather(2, 10, 14, issued=10, refused=3, on_demand=True)
    step.wait(2, 10, 14).forward(2, 14, 20)
    assert verdict(step.passes(forward=40).end())[Cause.NO_SLOT] == pytest.approx(4)


def test_without_prefetch_the_ring_is_too_small() -> None:
    step = first_unit().gather(2, 10, 14, issued=10, on_demand=True)
    step.wait(2, 10, 14).forward(2, 14, 20)
    assert Cause.NO_SLOT in verdict(step.passes(forward=40).end(), depth=0)


def test_a_slot_that_is_still_read_holds_up_a_gather_that_was_issued() -> None:
    """On a GPU the host is ahead and issues the gather long before its slot is free."""
    step = first_unit().gather(2, 9, 14, issued=2.5, possible=9).wait(2, 10, 14)
    found = verdict(step.forward(2, 14, 20, lead=11).passes(forward=40).end(), on_gpu=True)
    assert found[Cause.NO_SLOT] == pytest.approx(4)


def test_a_unit_that_was_not_prefetched_is_issued_late() -> None:
    step = first_unit().gather(2, 10, 14, issued=10, on_demand=True)
    step.wait(2, 10, 14).forward(2, 14, 20)
    assert verdict(step.passes(forward=40).end())[Cause.ISSUED_LATE] == pytest.approx(4)


def test_a_lane_that_begins_late_is_behind() -> None:
    step = first_unit().gather(2, 12, 14, issued=2.5, possible=2).wait(2, 10, 14).forward(2, 14, 20)
    assert verdict(step.passes(forward=40).end())[Cause.ISSUED_LATE] > 3.5


def test_a_gpu_that_computes_what_was_just_issued_had_waited_for_the_host() -> None:
    step = Step().gather(0, 0, 1).wait(0, 0, 1).forward(0, 1, 40).forward(1, 2, 3)
    step.gather(2, 20, 24, issued=20).forward(3, 20.01, 21).wait(2, 21, 24).forward(2, 24, 30)
    found = verdict(step.passes(forward=40).end(), on_gpu=True)
    assert found[Cause.ISSUED_LATE] == pytest.approx(3)
    # On the CPU the host computes, so a deeper prefetch would have helped.
    assert verdict(step.passes(forward=40).end())[Cause.NO_SLOT] == pytest.approx(3)


def test_idle_time_is_not_counted_twice() -> None:
    """Two gathers in a row follow 2 idle ms, so 2 ms of their waits could have been hidden."""
    step = first_unit().gather(2, 4, 13, issued=4).gather(3, 13, 22, issued=10)
    step.wait(2, 10, 13).forward(2, 13, 15).wait(3, 15, 22).forward(3, 22, 30)
    found = verdict(step.passes(forward=40).end())
    assert found[Cause.NO_SLOT] == pytest.approx(2)
    assert found[Cause.BANDWIDTH] == pytest.approx(8)


def test_before_it_was_refused_a_gather_was_late_for_another_reason() -> None:
    step = first_unit().gather(2, 30, 34, issued=30, refused=29).forward(3, 30.01, 31)
    iteration = step.wait(2, 31, 34).forward(2, 34, 36).passes(forward=40).end()
    found = verdict(iteration, on_gpu=True)
    assert found[Cause.ISSUED_LATE] == pytest.approx(3 * 27 / 28)
    assert found[Cause.NO_SLOT] == pytest.approx(3 * 1 / 28)


def test_casts_of_one_rank_are_no_gathers() -> None:
    step = Step().add("cast", "forward", 1, 0, 2).wait(1, 0, 2).forward(1, 2, 10)
    step.add("pack", "backward", 1, 50, 52).wait_reduced(50, 52)
    assert verdict(step.passes(forward=40, backward=60).end()) == {Cause.COPIES: pytest.approx(4)}


def test_a_bucket_is_known_by_its_first_and_last_unit_in_any_order() -> None:
    step = Step().gather((4, 2), 0, 5).wait((4, 2), 0, 5).forward(4, 5, 10)
    assert verdict(step.passes(forward=40).end()) == {Cause.FIRST: pytest.approx(5)}


def test_the_slowest_rank_is_named() -> None:
    step = first_unit().gather(2, 9, 14, issued=9).wait(2, 10, 14).forward(2, 14, 20)
    iteration = step.passes(forward=40).end()
    place = next(i for i, s in enumerate(iteration.spans) if s.units == (2, 2))
    late = {(1, place): Lateness(3 * MS, rank=5)}
    exposures = explain(iteration, Context(1, False, {}, late))
    assert [(e.rank, e.seconds / MS) for e in exposures if e.cause is Cause.LATE_RANK] == [
        (5, pytest.approx(3))
    ]


def test_by_itself_a_rank_knows_a_late_one_by_what_is_usual() -> None:
    usual = [first_unit().gather(2, 9, 9.5, issued=9).passes(forward=40).end() for _ in range(4)]
    step = first_unit().gather(2, 9, 14, issued=9).wait(2, 10, 14).forward(2, 14, 20)
    iteration = step.passes(forward=40).end()
    typical = typical_seconds([*usual, iteration])
    assert verdict(iteration, typical=typical)[Cause.LATE_RANK] == pytest.approx(4)
    # A merge finds no stragglers of group gathers.
    late = {(1, 1): Lateness(0.0, rank=0)}
    assert verdict(iteration, late=late, typical=typical)[Cause.LATE_RANK] == pytest.approx(4)
    late = {(1, iteration.spans.index(span)): Lateness(0.0, rank=0) for span in iteration.spans}
    assert Cause.LATE_RANK not in verdict(iteration, late=late, typical=typical)


def recording_of(*iterations: Iteration, is_simulated: bool = False) -> Recording:
    """Return a recording as a profile of a model with three units makes it."""
    ranks = SimpleNamespace(rank_in_mesh=0, world_size=2, replicas=1)
    root: Any = SimpleNamespace(
        units=[
            SimpleNamespace(name=name, params=[], ranks=ranks, device=torch.device("cpu"))
            for name in ("root", "1", "2")
        ],
        impl=SimpleNamespace(
            layout_of=lambda number: SimpleNamespace(unsharded_bytes=1000 if number else 0)
        ),
        lanes=SimpleNamespace(transport="simulated", is_simulated=is_simulated),
    )
    recording = Recording(root, kept=len(iterations))
    recording.prefetch_depth = 1
    recording.by_rank = {recording.rank: list(iterations)}
    return recording


def test_over_a_simulated_link_no_rank_comes_late() -> None:
    usual = [first_unit().gather(2, 9, 9.5, issued=9).passes(forward=40).end() for _ in range(4)]
    step = first_unit().gather(2, 9, 14, issued=9).wait(2, 10, 14).forward(2, 14, 20)
    steps = [*usual, step.passes(forward=40).end()]
    (found,) = recording_of(*steps, is_simulated=True).exposures[-1][2:]
    assert (found.cause, found.seconds) == (Cause.ISSUED_LATE, pytest.approx(4 * MS))
    (found,) = recording_of(*steps).exposures[-1][2:]
    assert found.cause is Cause.LATE_RANK


def test_a_long_wait_does_not_expose_what_was_hidden_before_it() -> None:
    """In the last of three steps the gather begins only in the wait, which is long."""
    hidden = [Step(n).gather(1, 5, 15).forward(0, 0, 20).passes(forward=40) for n in (1, 2)]
    late = Step(3).gather(1, 60, 70).wait(1, 20, 70).passes(forward=90)
    recording = recording_of(*(step.end() for step in (*hidden, late)))
    (row,) = rows_of(recording, "bucket")
    assert (row.wire, row.hidden) == (pytest.approx(10 * MS), pytest.approx(20 / 3 * MS))
    assert row.exposed == pytest.approx(50 / 3 * MS)
    assert summarise(recording).hidden == pytest.approx(2 / 3)
    # Of two messages of a bucket, only the second is exposed.
    step = Step().gather(1, 5, 15).gather(1, 60, 70).wait(1, 20, 70).passes(forward=90)
    (row,) = rows_of(recording_of(step.end()), "bucket")
    assert (row.wire, row.hidden) == (pytest.approx(20 * MS), pytest.approx(10 * MS))


class Counted(list[tuple[float, float]]):
    """Intervals that count how many of them are read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        self.read += len(self)
        return super().__iter__()


def test_an_overlap_reads_only_the_intervals_around_it() -> None:
    intervals = Counted((10.0 * i, 10.0 * i + 4) for i in range(1000))
    spans = {(-5, 0): 0, (1, 2): 1, (4, 10): 0, (3, 21): 6, (5000, 5004): 4, (9994, 10000): 0}
    spans |= {(7, 7): 0, (1, 1): 0, (-1, 0.5): 0.5}
    assert {span: overlap(*span, intervals) for span in spans} == spans
    assert intervals.read < 30 * len(spans)


def test_only_the_last_reduction_is_unavoidable() -> None:
    step = Step().reduce(2, 41, 50, issued=41).reduce(1, 50, 60, issued=45)
    step.wait_reduced(46, 60)
    assert verdict(step.passes(forward=40, backward=61).end()) == {
        Cause.BANDWIDTH: pytest.approx(4),
        Cause.LAST: pytest.approx(10),
    }


def explained(step: Step) -> list[tuple[str, int, Cause, float]]:
    """Return the operation, the unit, the cause and the milliseconds of each exposure."""
    exposures = explain(step.end(), Context(1, False, {}, {}))
    return [(e.operation, e.units[0], e.cause, round(e.seconds / MS, 3)) for e in exposures]


def test_the_end_of_backward_waits_for_all_reduces_and_between_them_for_reductions() -> None:
    step = Step().reduce(2, 41, 45).all_reduce(2, 45, 50).reduce(1, 45, 53).all_reduce(1, 53, 60)
    step.add("finish reduction", "backward", 1, 60, 62)
    step.wait_reduced(44, 62)
    assert explained(step.passes(forward=40, backward=63)) == [
        ("reduce", 2, Cause.BANDWIDTH, 1),
        ("all-reduce", 2, Cause.BANDWIDTH, 5),
        ("reduce", 1, Cause.LAST, 3),
        ("all-reduce", 1, Cause.LAST, 7),
        ("all-reduce", 1, Cause.LAST, 2),
    ]


def test_packing_waits_for_the_lane_of_reductions_and_else_for_all_reduces() -> None:
    step = Step().reduce(3, 41, 45).all_reduce(3, 45, 57).reduce(2, 45, 50).reduce(1, 57, 60)
    step.add("wait (reduction)", "backward", 1, 46, 58)
    step.all_reduce(2, 57, 70).wait_reduced(62, 70)
    assert explained(step.passes(forward=40, backward=71)) == [
        ("reduce", 2, Cause.LAST, 4),
        ("all-reduce", 3, Cause.BANDWIDTH, 7),
        ("reduce", 1, Cause.BANDWIDTH, 1),
        ("all-reduce", 2, Cause.LAST, 8),
    ]


def test_a_wait_for_updates_on_the_lane_is_the_optimizers() -> None:
    step = Step().reduce(2, 40, 50).add("update", "backward", 2, 50, 56)
    step.reduce(1, 60, 70).add("update", "backward", 1, 70, 78).wait_reduced(45, 78)
    assert explained(step.passes(forward=40, backward=78)) == [
        ("reduce", 2, Cause.BANDWIDTH, pytest.approx(5)),
        ("optimizer", 2, Cause.OPTIMIZER, pytest.approx(6)),
        ("reduce", 1, Cause.ISSUED_LATE, pytest.approx(4)),
        ("reduce", 1, Cause.LAST, pytest.approx(10)),
        ("optimizer", 1, Cause.OPTIMIZER, pytest.approx(8)),
    ]
    step = Step().reduce(1, 40, 50).all_reduce(1, 50, 60).add("update", "backward", 1, 60, 66)
    iteration = step.wait_reduced(60, 66).passes(forward=40, backward=66).end()
    assert iteration.lane_of("update") == "all-reduce"
    assert verdict(iteration) == {Cause.OPTIMIZER: pytest.approx(6)}


def test_a_waiter_that_wakes_up_late_was_behind() -> None:
    gathered = first_unit()
    assert Cause.ISSUED_LATE not in verdict(gathered.passes(forward=40).end())
    step = Step().reduce(1, 41, 50, issued=41)
    step.wait_reduced(46, 60)
    assert verdict(step.passes(forward=40, backward=61).end()) == {
        Cause.LAST: pytest.approx(4),
        Cause.ISSUED_LATE: pytest.approx(10),
    }
    step = Step().gather(1, 0, 4).wait(1, 0, 9).forward(1, 9, 20)
    assert verdict(step.passes(forward=40).end()) == {
        Cause.FIRST: pytest.approx(4),
        Cause.ISSUED_LATE: pytest.approx(5),
    }


def test_a_wait_for_what_was_not_recorded_is_unknown() -> None:
    step = Step().wait(3, 1, 2).passes(forward=40)
    assert verdict(step.end()) == {Cause.UNKNOWN: pytest.approx(1)}


def test_a_step_is_compute_and_exposed_and_other() -> None:
    step = first_unit().reduce(1, 70, 80).wait_reduced(75, 80)
    iteration = step.passes(forward=40, backward=80).end(at=95)
    assert iteration.step == pytest.approx(95 * MS)
    assert iteration.exposed == pytest.approx(7 * MS)
    assert iteration.compute == pytest.approx(73 * MS)
    assert iteration.other == pytest.approx(15 * MS)


def test_units_of_one_size_tell_what_communication_costs_compute() -> None:
    step = Step().gather(2, 0, 10).gather(3, 20, 30)
    step.forward(1, 0, 10).forward(2, 10, 18).forward(3, 20, 30).forward(4, 30, 38)
    iteration = step.passes(forward=40).end()
    found = slowdown([iteration], [0, 100, 100, 100, 100])
    assert found is not None
    assert found.factor == pytest.approx(10 / 8)
    assert found.seconds == pytest.approx(4 * MS)
    assert slowdown([iteration], [0, 1, 2, 3, 4]) is None  # no other unit of its kind
    # A single slow unit may simply be of another kind.
    assert slowdown([iteration], [0, 100, 100, 100, 1]) is None


def test_exposures_come_in_order() -> None:
    step = first_unit().gather(2, 2, 16, issued=2).wait(2, 10, 16).forward(2, 16, 20)
    exposures = explain(step.passes(forward=40).end(), Context(1, False, {}, {}))
    begins = [exposure.begin for exposure in exposures]
    assert begins == sorted(begins)
    assert all(isinstance(exposure, Exposure) for exposure in exposures)
