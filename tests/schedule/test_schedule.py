"""The model of the schedule: cases written out, and properties of every chain of stages."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from support.launcher import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.planner.schedule import Prediction, Stage, predict

ROOT = "the root"
NO_TIME = Link("no time", alpha=0.0, beta=1e30)


def fixed(seconds: float) -> Link:
    """Return a link on which each collective takes equally long, whatever its size."""
    return Link("fixed", alpha=seconds, beta=1e30)


def stage(name: str, forward: float, backward: float, *, reduces: bool = True) -> Stage:
    return Stage(name, forward, backward, gather_bytes=1, reduce_bytes=int(reduces))


def spans(prediction: Prediction, lane: str) -> list[tuple[str, float, float]]:
    return [(s.name, s.begin, s.end) for s in prediction.spans if s.lane == lane]


# - By hand


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    step = predict(None, [stage("a", 2, 4), stage("b", 2, 4)], fixed(1))
    assert spans(step, "gather") == [("a", 0, 1), ("b", 1, 2)]
    assert spans(step, "compute") == [("a", 1, 3), ("b", 3, 5), ("b", 5, 9), ("a", 9, 13)]
    assert spans(step, "reduce") == [("b", 9, 10), ("a", 13, 14)]
    assert (step.step, step.compute, step.exposed, step.wire) == (14, 12, 2, 4)
    assert step.hidden == 0.5


def test_compute_waits_for_a_slow_wire_and_backward_gathers_what_is_gone() -> None:
    step = predict(None, [stage(name, 1, 1) for name in "abc"], fixed(3))
    assert spans(step, "gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9), ("a", 11, 14)]
    assert spans(step, "compute")[-2:] == [("b", 11, 12), ("a", 14, 15)]
    assert spans(step, "reduce") == [("c", 11, 14), ("b", 14, 17), ("a", 17, 20)]
    assert step.step == 20


def test_a_gather_and_a_reduction_share_one_wire() -> None:
    stages = [stage(name, 1, 1) for name in "abc"]
    step = predict(None, stages, replace(fixed(3), one_wire=True))
    assert spans(step, "gather") == [("a", 0, 3), ("b", 3, 6), ("c", 6, 9), ("a", 11, 17)]
    # From 11 to 17 a gather and a reduction share the wire, so each has half of its rate.
    assert spans(step, "reduce") == [("c", 11, 17), ("b", 17, 20), ("a", 20, 23)]
    assert step.step == 23


def test_two_lanes_on_one_wire_take_as_much_of_compute_as_one() -> None:
    chain = [stage(name, 8, 8) for name in "abc"]
    step = predict(None, chain, replace(fixed(2), one_wire=True), contention=0.5)
    # From 36 to 40 both travel, and 2 of the 8 seconds of b's backward are computed.
    assert spans(step, "gather")[-1] == ("a", 36, 40)
    assert spans(step, "reduce")[0] == ("c", 36, 40)
    assert spans(step, "compute")[-2] == ("b", 36, 46)


def test_copies_without_a_wire_take_their_lane_but_no_latency() -> None:
    cast = Stage("a", 2, 4, 0, 0, copy_seconds_gather=1, copy_seconds_reduce=3)
    step = predict(None, [cast], fixed(100))
    assert spans(step, "gather") == [("a", 0, 1)]  # it is still in its slot in backward
    assert spans(step, "reduce") == [("a", 7, 10)]
    assert step.step == 10


def test_a_single_rank_copies_only_what_it_casts() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wire = []
    for dtype in (None, torch.bfloat16):
        plan = fsdp_ext.plan(
            model,
            world_size=1,
            units=nn.Linear,
            mp_policy=MixedPrecisionPolicy(dtype),
            device_type="cpu",
            compute={"0": (1e-3, 2e-3), "1": (1e-3, 2e-3)},
            copies=(1e-9, 1e-9),
        )
        assert plan.prediction is not None
        wire.append({span.lane for span in plan.prediction.spans})
    assert wire == [{"compute"}, {"compute", "gather", "reduce"}]


def test_the_root_is_gathered_first_and_reduced_last() -> None:
    step = predict(
        replace(stage("root", 1, 1), reshards=False),
        [stage("a", 2, 4), stage("b", 2, 4)],
        fixed(1),
    )
    assert spans(step, "gather") == [("root", 0, 1), ("a", 1, 2), ("b", 2, 3)]
    assert [name for name, *_ in spans(step, "compute")] == ["a", "b", "root", "root", "b", "a"]
    assert spans(step, "reduce") == [("b", 12, 13), ("a", 16, 17), ("root", 17, 18)]
    assert (step.step, step.compute) == (18, 14)


def test_a_root_that_reshards_holds_a_slot_so_that_nothing_is_gathered_ahead() -> None:
    step = predict(stage("root", 0, 0), [stage("a", 1, 1), stage("b", 1, 1)], fixed(1))
    # b is gathered when a's slot is free, and in backward a is gathered when b's slot is.
    assert spans(step, "gather") == [("root", 0, 1), ("a", 1, 2), ("b", 3, 4), ("a", 6, 7)]


def test_stages_that_stay_unsharded_are_gathered_once() -> None:
    chain = [replace(stage(name, 1, 1), reshards=False) for name in "abcd"]
    assert [name for name, *_ in spans(predict(None, chain, fixed(1)), "gather")] == list("abcd")


def test_stages_without_a_backward_are_gathered_once_and_not_reduced() -> None:
    frozen = [replace(stage(name, 1, 1, reduces=False), has_backward=False) for name in "abc"]
    step = predict(None, [*frozen, stage("d", 1, 1)], fixed(1))
    assert [name for name, *_ in spans(step, "gather")] == list("abcd")
    assert [name for name, *_ in spans(step, "compute")] == [*"abcd", "d"]
    assert (step.compute, step.exposed) == (5, 2)
    assert predict(frozen[0], frozen[1:], fixed(1)).compute == 3


def test_stages_without_parameters_send_nothing() -> None:
    chain = [Stage("a", 1, 2, gather_bytes=0, reduce_bytes=0)] * 3
    step = predict(None, chain, fixed(1))
    assert (step.step, step.wire, step.hidden) == (9, 0, 1)


def test_nothing_is_gathered_ahead_at_depth_0() -> None:
    step = predict(None, [stage("a", 1, 1), stage("b", 1, 1)], fixed(1), depth=0)
    assert spans(step, "gather") == [("a", 0, 1), ("b", 2, 3), ("a", 5, 6)]


def test_compute_loses_the_part_of_the_wire_that_contention_says() -> None:
    chain = [stage("a", 2, 0, reduces=False), stage("b", 2, 0, reduces=False)]
    step = predict(None, chain, fixed(2), contention=0.5)
    # From 2 to 4, a runs at half its rate, because b's gather runs at the same time.
    assert spans(step, "compute")[:2] == [("a", 2, 5), ("b", 5, 7)]
    assert (step.step, step.exposed) == (7, 3)


def test_two_lanes_take_twice_as_much() -> None:
    # In backward, a's gather and c's reduction overlap b from 6 on.
    chain = [stage("a", 1, 1), stage("b", 1, 3), stage("c", 1, 1)]
    free, taken = (predict(None, chain, fixed(1), contention=c) for c in (0, 0.5))
    begin, end = next(span[1:] for span in spans(taken, "compute")[4:] if span[0] == "b")
    gathers, reductions = spans(taken, "gather"), spans(taken, "reduce")
    assert gathers[-1] == ("a", begin, begin + 1)
    assert reductions[0] == ("c", begin, begin + 1)
    assert end - begin == 3 + 1  # stalls for a second
    assert free.exposed < taken.exposed


def test_with_a_contention_of_1_nothing_is_hidden() -> None:
    step = predict(None, [stage("a", 2, 4), stage("b", 2, 4)], fixed(1), contention=1)
    assert step.hidden == 0
    assert step.step == step.compute + step.wire


def test_two_lanes_at_once_share_what_computes() -> None:
    # Two of ten collectives overlap a reduction: the gathers of b and a in backward.
    step = predict(None, [stage(name, 2, 4) for name in "abcd"], fixed(1), contention=1)
    assert step.exposed == step.wire


def test_packing_ahead_overlaps_the_wire_of_the_reduction_before() -> None:
    chain = [replace(stage(name, 1, 1), copy_seconds_reduce=2) for name in "abcd"]
    serial = predict(None, chain, fixed(4), depth=3)
    ahead = predict(None, chain, fixed(4), depth=3, packs_ahead=True)
    assert spans(serial, "reduce")[:3] == [("d", 18, 20), ("d", 20, 24), ("c", 24, 26)]
    # c is packed while d is on the wire, and b when d has left its input.
    assert spans(ahead, "reduce") == [
        ("d", 18, 20),
        ("c", 20, 22),
        ("d", 20, 24),
        ("b", 24, 26),
        ("c", 24, 28),
        ("a", 28, 30),
        ("b", 28, 32),
        ("a", 32, 36),
    ]
    assert serial.step - ahead.step == 3 * 2
    assert serial.wire == ahead.wire


def test_compute_waits_until_earlier_gradients_are_packed() -> None:
    def backward(sizes: tuple[int, ...]) -> list[tuple[str, float, float]]:
        chain = [
            Stage(name, 1, 1, 0, size, copy_seconds_reduce=2)
            for name, size in zip("abcd", sizes, strict=True)
        ]
        step = predict(None, chain, fixed(3))
        packed = [begin + 2 for _, begin, end in spans(step, "reduce") if end - begin == 2]
        assert packed == [7, 12, 17, 22]
        return spans(step, "compute")[4:]

    # Before the reductions of c and b, that is, before the backward of b and a.
    assert backward((1, 1, 1, 1)) == [("d", 4, 5), ("c", 5, 6), ("b", 7, 8), ("a", 12, 13)]
    # The gradients of c with those of d or b are too many, so these waits come a stage earlier.
    assert backward((1, 1, 3, 1)) == [("d", 4, 5), ("c", 7, 8), ("b", 12, 13), ("a", 13, 14)]


def reduced(names: str, **options: Any) -> list[Stage]:
    """Return stages that gather nothing. Forward takes 1 s of each, and so does backward."""
    return [Stage(name, 1, 1, 0, 1, all_reduce_bytes=1, **options) for name in names]


def test_updates_run_where_compute_does_or_on_the_lane() -> None:
    stages = [Stage(name, 1, 1, 0, 1, update=2) for name in "abc"]
    on_host = predict(None, stages, fixed(1))
    assert spans(on_host, "reduce") == [("c", 4, 5), ("b", 5, 6), ("a", 8, 9)]
    assert spans(on_host, "compute")[5:] == [("a", 5, 6), ("c", 6, 8), ("b", 8, 10), ("a", 10, 12)]
    assert (on_host.step, on_host.compute, on_host.wire) == (12, 12, 3)
    slow = predict(None, stages, fixed(3))
    assert spans(slow, "reduce") == [("c", 4, 7), ("b", 7, 10), ("a", 10, 13)]
    assert spans(slow, "compute")[5:] == [("a", 5, 6), ("c", 7, 9), ("b", 10, 12), ("a", 13, 15)]
    on_gpu = predict(None, stages, fixed(1), updates_on_lane=True)
    assert spans(on_gpu, "reduce") == [
        ("c", 4, 5),
        ("c", 5, 7),
        ("b", 7, 8),
        ("b", 8, 10),
        ("a", 10, 11),
        ("a", 11, 13),
    ]
    assert (on_gpu.step, on_gpu.compute, on_gpu.wire) == (13, 6, 9)
    # Compute waits for the update of c before the reduction of a is issued.
    alone = [Stage(name, 1, 1, 0, 0, update=2) for name in "ab"]  # one rank has nothing to reduce
    assert predict(None, alone, fixed(1), updates_on_lane=True).step == 7
    assert predict(None, alone, fixed(1)).step == 8
    behind = [Stage("last", 0, 1, 0, 0), *stages]
    assert spans(predict(None, behind, fixed(1), updates_on_lane=True), "compute")[-1][1:] == (7, 8)


def test_updates_follow_all_reduces_on_their_lane() -> None:
    stages = reduced("abc", update=1)
    step = predict(None, stages, fixed(1), replica_link=fixed(2), updates_on_lane=True)
    assert spans(step, "reduce") == [("c", 4, 5), ("b", 5, 6), ("a", 8, 9)]
    assert spans(step, "all-reduce") == [
        ("c", 5, 7),
        ("c", 7, 8),
        ("b", 8, 10),
        ("b", 10, 11),
        ("a", 11, 13),
        ("a", 13, 14),
    ]


def test_replicas_sum_a_bucket_while_the_next_one_is_reduced() -> None:
    step = predict(None, reduced("abc"), fixed(1), replica_link=fixed(2))
    assert spans(step, "reduce") == [("c", 4, 5), ("b", 5, 6), ("a", 6, 7)]
    assert spans(step, "all-reduce") == [("c", 5, 7), ("b", 7, 9), ("a", 9, 11)]
    assert (step.step, step.exposed, step.wire) == (11, 5, 9)
    stages = [replace(stage, all_reduce_bytes=0) for stage in reduced("abc")]
    without = predict(None, stages, fixed(1), replica_link=fixed(2))
    assert (without.step, without.wire) == (7, 3)
    with pytest.raises(ValueError, match=r"no replica_link\. Pass the link between replicas"):
        predict(None, reduced("a"), fixed(1))


def test_reductions_with_replicas_take_turns_with_two_outputs() -> None:
    chain = reduced("abc", reduces_in_place=False)
    step = predict(None, chain, fixed(1), replica_link=fixed(5))
    # a is reduced when c has left its output.
    assert spans(step, "reduce") == [("c", 4, 5), ("b", 5, 6), ("a", 10, 11)]
    assert spans(step, "all-reduce") == [("c", 5, 10), ("b", 10, 15), ("a", 15, 20)]


def test_replicas_sum_each_message_of_a_bucket_by_itself() -> None:
    bytes_only = Link("without latency", alpha=0.0, beta=1.0)
    (one,) = reduced("a", reduce_messages=2)
    one = replace(one, reduce_bytes=4, all_reduce_bytes=2)
    step = predict(None, [one], bytes_only, replica_link=bytes_only)
    assert spans(step, "reduce") == [("a", 2, 4), ("a", 4, 6)]
    assert spans(step, "all-reduce") == [("a", 4, 6), ("a", 6, 8)]


def test_copies_and_messages_take_the_lanes_time() -> None:
    one = replace(
        stage("a", 1, 1),
        gather_messages=3,
        reduce_messages=2,
        copy_seconds_gather=0.5,
        copy_seconds_reduce=0.25,
    )
    step = predict(None, [one], fixed(1))
    assert spans(step, "gather") == [("a", 0, 3.5)]
    assert spans(step, "reduce") == [("a", 5.5, 5.75), ("a", 5.75, 7.75)]
    assert step.compute == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": -1}, "depth=-1 and slots=.* a depth of 0 or more"),
        ({"slots": 0}, "slots=0. Pass .* at least one slot"),
        ({"contention": -0.1}, "contention=-0.1. Pass 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(None, [stage("a", 1, 1)], fixed(1), **arguments)


def test_a_stage_expects_numbers_of_0_or_more() -> None:
    with pytest.raises(ValueError, match=r"stage 'a' got backward=-1\."):
        stage("a", 1, -1)


# - As in a run

Issued = dict[str, list[tuple[str, int]]]  # on each lane: names, and how many units ran before


def _random_model(seed: int) -> nn.Module:
    random = Random(seed)
    count = random.randint(2, 7)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count + 1)])
    shared: dict[str, Any] = {"transport": Simulated(8, NO_TIME), "bucket_bytes": 0}
    for layer in model[:count]:
        fully_shard(layer, reshard_after_forward=random.random() < 0.7, **shared)
    resharding = random.choice([None, True, False])
    fully_shard(model, reshard_after_forward=resharding, prefetch=random.randint(0, 4), **shared)
    for layer in model[:count]:
        layer.requires_grad_(random.random() < 0.7)
    return model


def _issued(
    computed: list[tuple[str, float, float]],
    gathered: list[tuple[str, float]],
    reduced: list[tuple[str, float]],
) -> Issued:
    """Compare times; a gather is issued before its unit begins, a reduction after it has begun."""
    inner = [(begin, end) for name, begin, end in computed if name != ROOT]
    return {
        "gather": [(name, sum(end <= at for _, end in inner)) for name, at in gathered],
        "reduce": [(name, sum(begin < at for begin, _ in inner)) for name, at in reduced],
    }


def _run_and_predict(seeds: range) -> None:
    dist.destroy_process_group()  # Simulated makes its own
    warnings.simplefilter("ignore")
    for seed in seeds:
        model = _random_model(seed)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        with fsdp_ext.profile(model) as prof:
            model(torch.ones(4, 8)).sum().backward()
        (iteration,) = prof.iterations
        computed = iteration.of("unit forward", "unit backward")
        run = _issued(
            [(prof.name_of(span.units), span.begin, span.end) for span in computed],
            [(prof.name_of(span.units), span.issued) for span in iteration.of("gather")],
            [(prof.name_of(span.units), span.issued) for span in iteration.of("reduce")],
        )
        seconds = {unit.name: (1.0, 1.0) for unit in fsdp_ext.plan(model).units}
        step = fsdp_ext.plan(model, link=NO_TIME, compute=seconds).prediction
        assert step is not None
        # The link takes no time, so each collective begins when it is issued.
        predicted = _issued(
            spans(step, "compute"),
            [(name, begin) for name, begin, _ in spans(step, "gather")],
            [(name, begin) for name, begin, _ in spans(step, "reduce")],
        )
        assert run == predicted, f"seed {seed}: {model}"


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.exhaustive)]
)
def test_collectives_are_issued_where_a_run_issues_them(seeds: range) -> None:
    run_ranks(_run_and_predict, 1, seeds)


# - Of every chain

seconds = st.floats(0, 1e-2)
stage_lists = st.lists(
    st.builds(
        Stage,
        name=st.just("a"),
        forward=seconds,
        backward=seconds,
        gather_bytes=st.integers(0, 10**8),
        reduce_bytes=st.integers(0, 10**8),
        reshards=st.booleans(),
        copy_seconds_gather=seconds,
        copy_seconds_reduce=seconds,
    ),
    min_size=1,
    max_size=8,
)
links = st.builds(Link, name=st.just("a link"), alpha=st.floats(0, 1e-3), beta=st.floats(1e9, 1e12))
depths = st.integers(0, 4)
NEARLY = 1 + 1e-9  # times are sums of floats


def no_more(smaller: float, larger: float) -> bool:
    return smaller <= larger * NEARLY + 1e-12


@settings(max_examples=200, deadline=None)
@given(stage_lists, links, depths, st.floats(0, 1), st.booleans())
def test_a_step_has_room_for_each_lane(
    chain: list[Stage], link: Link, depth: int, contention: float, has_root: bool
) -> None:
    root = chain[0] if has_root else None
    step = predict(root, chain[has_root:], link, depth=depth, contention=contention)
    for lane in ("compute", "gather", "reduce"):
        times = spans(step, lane)
        assert all(no_more(end, begin) for (*_, end), (_, begin, _) in itertools.pairwise(times))
        assert no_more(sum(end - begin for _, begin, end in times), step.step)
    assert no_more(step.compute, step.step)
    assert no_more(step.exposed, step.wire)
    assert 0 <= step.hidden <= 1
    assert len(spans(step, "compute")) == 2 * len(chain)
    assert len(spans(step, "reduce")) == sum(
        (part.reduce_bytes > 0) + (part.copy_seconds_reduce > 0) for part in chain
    )


@settings(max_examples=200, deadline=None)
@given(stage_lists, links, depths, st.floats(1, 10), st.floats(1, 10))
def test_a_slower_link_makes_no_step_faster(
    chain: list[Stage], link: Link, depth: int, latency: float, rate: float
) -> None:
    slower = replace(link, alpha=link.alpha * latency, beta=link.beta / rate)
    steps = [predict(None, chain, each, depth=depth).step for each in (link, slower)]
    assert no_more(*steps)


@settings(max_examples=200, deadline=None)
@given(stage_lists, links, depths, st.integers(1, 4))
def test_more_slots_or_depth_make_no_step_slower(
    chain: list[Stage], link: Link, depth: int, slots: int
) -> None:
    less = predict(None, chain, link, depth=depth, slots=slots).step
    assert no_more(predict(None, chain, link, depth=depth, slots=slots + 1).step, less)
    assert no_more(predict(None, chain, link, depth=depth + 1, slots=slots).step, less)
    ring = [predict(None, chain, link, depth=each).step for each in (depth, depth + 1)]
    assert no_more(ring[1], ring[0])


@settings(max_examples=200, deadline=None)
@given(stage_lists, links, depths, st.floats(0, 1))
def test_contention_costs_no_more_than_its_part_of_the_wire(
    chain: list[Stage], link: Link, depth: int, contention: float
) -> None:
    free = predict(None, chain, link, depth=depth)
    taken = predict(None, chain, link, depth=depth, contention=contention)
    assert no_more(free.step, taken.step)
    assert no_more(taken.step, free.step + contention * free.wire)


@settings(max_examples=50, deadline=None)
@given(stage_lists, depths, st.floats(0, 1))
def test_over_a_link_without_time_a_step_is_its_compute(
    chain: list[Stage], depth: int, contention: float
) -> None:
    chain = [replace(part, copy_seconds_gather=0, copy_seconds_reduce=0) for part in chain]
    step = predict(None, chain, NO_TIME, depth=depth, contention=contention)
    assert step.step == pytest.approx(step.compute, abs=1e-15)
    assert step.exposed == pytest.approx(0, abs=1e-15)
