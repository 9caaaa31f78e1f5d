"""``fsdp_ext.profile``: what it records, how that adds up, and the causes of planted faults."""

from __future__ import annotations

import json
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.profiling import LAYERS, UNIT, WIDTH, Pause, check_sums, make, profiled, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext._util.files import write_text
from fsdp_ext.profiler.causes import Cause

PLANTED = 0.02  # seconds
ATTEMPTS = 4  # other load on the machine may hide what is planted


def causes(prof: Any) -> dict[str, float]:
    check_sums(prof)
    return dict(prof.summary().causes)


# - Planted faults


def _simulated(kind: str) -> dict[str, float]:
    dist.destroy_process_group()  # Simulated makes its own
    warnings.simplefilter("ignore")
    fast = Link("fast", alpha=1e-3, beta=1e12)
    if kind == "slow link":
        return causes(profiled(make(Simulated(8, Link("slow", alpha=PLANTED, beta=1e12)))))
    if kind == "ring of one slot":
        return causes(profiled(make(Simulated(8, Link("slow", 3e-3, 1e12)), prefetch=0)))
    if kind == "slow host":
        model = make(Simulated(8, fast))
        core: list[Any] = []

        def stall(step: int) -> None:
            core[:] = [model._fsdp_ext_unit.root.impl]

        # The thread of the gather lane stands still in the middle of forward.
        model[2].register_forward_pre_hook(
            lambda *_: core[0].delay_stream("gather", PLANTED) if core else None
        )
        return causes(profiled(model, stall))
    return causes(profiled(make(Simulated(8, fast))))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("slow link", Cause.BANDWIDTH),
        ("ring of one slot", Cause.NO_SLOT),
        ("slow host", Cause.ISSUED_LATE),
    ],
)
def test_a_planted_fault_is_the_largest_cause(kind: str, cause: Cause) -> None:
    (found,) = run_ranks(_simulated, 1, kind)
    avoidable = {
        name: seconds
        for name, seconds in found.items()
        if name not in (Cause.FIRST.value, Cause.LAST.value)
    }
    assert max(avoidable, key=lambda name: avoidable[name]) == cause.value, found


def _gathers_ahead() -> bool:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    model = make(Simulated(8, Link("slow", alpha=PLANTED, beta=1e12)))
    steps, recorded = 4, 3  # the gathers of the first step were issued before the profile began
    for _ in range(ATTEMPTS):
        found = causes(profiled(model, lambda step: model.prefetch_next_forward()))
        if found.get(Cause.AHEAD.value, 0.0) > recorded * PLANTED / steps / 2:
            return True
    return False


def test_waits_for_gathers_ahead_of_forward_have_a_cause_of_their_own() -> None:
    assert run_ranks(_gathers_ahead, 1) == [True]


def _slowed() -> str:
    """Units that compute beside a gather take twice as long as the other units alone."""
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    model = make(Simulated(8, Link("fair", 4e-3, 1e12)), compute=2.5e-3, bucket_bytes=2 * UNIT)
    for beside in (0, 2):  # the first of a bucket computes while the next bucket is gathered
        model[beside].seconds = 5e-3
    for _ in range(ATTEMPTS):
        prof = profiled(model)
        check_sums(prof)
        if prof.summary().slowed > 2.5e-3:
            return str(prof)
    return "not found"


def test_compute_that_is_slower_beside_communication_is_reported() -> None:
    (text,) = run_ranks(_slowed, 1)
    assert f"of compute) {Cause.SLOWED.value}" in text


def _stalled() -> tuple[dict[str, float], dict[str, float], set[int], list[str], str]:
    warnings.simplefilter("ignore")
    model = make()
    rank = dist.get_rank()
    stalls = [0.0]
    model[3].register_forward_pre_hook(lambda *_: time.sleep(stalls[0]))

    def stall(step: int) -> None:
        stalls[0] = 3 * PLANTED if rank == 1 and step == 2 else 0.0

    prof = profiled(model, stall)
    alone = causes(prof)
    assert prof.merge(timelines=False) is prof
    assert list(prof.ranks) == [rank]
    without = causes(prof)
    assert prof.merge() is prof
    merged = causes(prof)
    assert merged == without
    ranks = {e.rank for found in prof.explain() for e in found if e.cause is Cause.LATE_RANK}
    document = json.loads(prof.to_json())
    return alone, merged, ranks, sorted(document["ranks"]), str(prof)


def test_a_stalled_rank_is_named_by_the_others() -> None:
    (alone, merged, ranks, known, text), (_, of_itself, _, _, _) = run_ranks(_stalled, 2)
    for found in (alone, merged):
        # One of the four steps has the stall. Load on the machine may add to all other causes.
        assert found[Cause.LATE_RANK.value] > 3 * PLANTED / 4 / 2, found
    assert 1 in ranks
    assert known == ["0", "1"]
    assert "rank 1 comes last" in text
    late = Cause.LATE_RANK.value
    assert of_itself.get(late, 0.0) < merged[late]


def _slow_all_reduces() -> tuple[dict[str, float], str]:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    fast, slow = Link("fast", alpha=1e-3, beta=1e12), Link("slow", alpha=PLANTED, beta=1e12)
    transport = Simulated(16, fast, rank=9, replicas=2, replica_link=slow)
    transport.init_process_group()
    prof = profiled(make(transport, mesh=init_device_mesh("cpu", (2, 8))))
    causes(prof)
    exposed = {"gather": 0.0, "reduce": 0.0, "all-reduce": 0.0}
    for row in prof.rows():
        exposed[row.operation] += row.exposed
    return exposed, str(prof)


def test_a_slow_link_between_replicas_exposes_all_reduces() -> None:
    ((exposed, text),) = run_ranks(_slow_all_reduces, 1)
    assert max(exposed, key=lambda operation: exposed[operation]) == "all-reduce", exposed
    assert exposed["all-reduce"] > (LAYERS - 1) * PLANTED / 2
    assert "on rank 9 of 16 (2 shard groups of 8) over a simulated link" in text
    assert "all-reduce  backward" in text


def _replica_that_stalls() -> tuple[dict[str, set[int]], str, int]:
    """Let one rank hold up its shard group's gathers, and with them its replica's all-reduces."""
    warnings.simplefilter("ignore")
    model = make(mesh=init_device_mesh("cpu", (2, 2)), compute=0.0)
    rank = dist.get_rank()
    late = [False]
    model[3].register_forward_pre_hook(lambda *_: time.sleep(3 * PLANTED) if late[0] else None)

    def stall(step: int) -> None:
        late[0] = rank == 3 and step == 2

    prof = profiled(model, stall)
    check_sums(prof)
    prof.merge()
    check_sums(prof)
    assert sorted(prof.ranks) == [0, 1, 2, 3]
    held_up: dict[str, set[int]] = {}
    for iteration in prof.iterations:
        for place, span in enumerate(iteration.spans):
            found = prof.late.get((iteration.number, place))
            if found is not None and found.spread > PLANTED:
                held_up.setdefault(span.work, set()).add(found.rank)
    for iteration in prof.iterations:
        assert len(iteration.of("all-reduce")) == len(iteration.of("reduce")) == LAYERS
        assert {span.nbytes for span in iteration.of("all-reduce")} == {UNIT // 2}
    return held_up, str(prof), prof.world_size


def test_stragglers_are_those_of_each_group_of_ranks() -> None:
    answers = run_ranks(_replica_that_stalls, 4)
    assert [size for *_, size in answers] == [4] * 4
    # Ranks 2 and 3 are a shard group, and so are 0 and 1. Ranks 1 and 3 are replicas.
    held_up = [works for works, *_ in answers]
    assert 3 in held_up[2]["gather"] <= {2, 3}
    assert held_up[0].get("gather", set()) <= {0, 1}
    assert 3 in held_up[1]["all-reduce"] <= {1, 3}
    assert 2 in held_up[0]["all-reduce"] <= {0, 2}
    assert "on rank 1 of 4 (2 shard groups of 2) over shared_memory" in answers[1][1]


# - What is recorded


def _adds_up(kind: str) -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    start = time.monotonic()
    with fsdp_ext.profile(model) as prof:
        if kind == "accumulates":
            model.set_requires_gradient_sync(False)
            train(model, 1)
            model.set_requires_gradient_sync(True)
            train(model, 1)
        elif kind == "evaluates":
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(1, WIDTH))
        elif kind == "two forwards":
            for _ in range(2):
                x = torch.ones(1, WIDTH)
                (model(x).sum() + model(2 * x).sum()).backward()
        elif kind == "unshard()":
            model[0].unshard()
            train(model, 2)
            model[1].unshard()
            model[1].reshard()
        else:
            train(model, 2)
    taken = time.monotonic() - start
    check_sums(prof)
    assert len(prof.iterations) == 2
    assert sum(iteration.step for iteration in prof.iterations) <= taken
    numbers = [iteration.number for iteration in prof.iterations]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    passes = {"evaluates": 0}.get(kind, 1)
    assert all(len(iteration.of("backward")) == passes for iteration in prof.iterations)
    computed = prof.iterations[-1].of("unit forward")
    forwards = 2 if kind == "two forwards" else 1
    assert [s.first for s in computed] == list(range(LAYERS + 1)) * forwards
    train(model, 1)  # and nothing is recorded any more
    assert model._fsdp_ext_unit.root.impl.take_times() == ([], 0)


@pytest.mark.parametrize(
    "kind", ["trains", "accumulates", "evaluates", "two forwards", "unshard()"]
)
def test_what_is_recorded_adds_up(kind: str) -> None:
    run_ranks(_adds_up, 2, kind)


def _slow_to_read() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    impl = model._fsdp_ext_unit.root.impl
    take_times = impl.take_times
    asked: list[float] = []
    with pytest.MonkeyPatch.context() as context, fsdp_ext.profile(model) as prof:
        train(model, 2)
        context.setattr(
            type(impl), "take_times", lambda _: asked.append(time.monotonic()) or take_times()
        )
    assert prof.iterations[-1].end <= asked[0]


def test_the_last_step_ends_before_its_times_are_read() -> None:
    run_ranks(_slow_to_read, 1)


def _collectives() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    with fsdp_ext.profile(model) as prof:
        train(model, 1)
    (iteration,) = prof.iterations
    recorded = [
        ({"gather": "all_gather", "reduce": "reduce_scatter"}[s.work], s.phase, s.nbytes)
        for s in iteration.spans
        if s.work in ("gather", "reduce")
    ]
    assert recorded == [(op, phase, nbytes) for op, phase, _, nbytes in impl.take_log()]
    for span in iteration.of("gather", "reduce"):
        assert iteration.begin <= span.issued <= span.begin <= span.end <= iteration.end
    wire = sum(row.nbytes for row in prof.rows())
    assert wire == sum(nbytes for *_, nbytes in recorded)


def test_every_collective_is_recorded_once_and_in_order() -> None:
    run_ranks(_collectives, 2)


def _ring_of_iterations() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    with fsdp_ext.profile(model, iterations=2) as prof:
        train(model, 5)
    assert [iteration.number for iteration in prof.iterations] == [4, 5]
    assert prof.lost == 3
    assert "3 older steps were not kept" in str(prof)


def test_the_last_steps_are_kept() -> None:
    run_ranks(_ring_of_iterations, 1)


def _exception() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    fail = [False]

    def maybe_fail(*_: object) -> None:
        if fail[0]:
            raise ArithmeticError("planted")

    model[3].register_forward_pre_hook(maybe_fail)
    with fsdp_ext.profile(model) as prof:
        train(model, 1)
        fail[0] = True
        with pytest.raises(ArithmeticError):
            train(model, 1)
        fail[0] = False
        train(model, 2)
    assert [iteration.number for iteration in prof.iterations] == [1, 3, 4]
    check_sums(prof)
    fail[0] = True
    with pytest.raises(ArithmeticError), fsdp_ext.profile(model):
        train(model, 1)
    fail[0] = False
    train(model, 1)


def test_a_step_that_fails_is_left_out() -> None:
    run_ranks(_exception, 1)


def _same_numbers(profiles: bool) -> list[Tensor]:
    warnings.simplefilter("ignore")
    model = make(compute=0.0, bucket_bytes=2 * UNIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 2)
    with fsdp_ext.profile(model) if profiles else nullcontext():
        for _ in range(3):
            train(model, 1)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def test_profiling_changes_no_number() -> None:
    with_it, without = (run_ranks(_same_numbers, 2, profiles)[0] for profiles in (True, False))
    assert all(map(torch.equal, with_it, without))


def _fsdp1() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = fsdp_ext.FullyShardedDataParallel(
        nn.Sequential(*(Pause(0.0) for _ in range(3))), auto_wrap_policy=ModuleWrapPolicy({Pause})
    )
    train(model, 2)
    with fsdp_ext.profile(model) as prof:
        train(model, 2)
    check_sums(prof)


def test_the_wrapper_of_fsdp1_can_be_profiled() -> None:
    run_ranks(_fsdp1, 2)


def _any_order() -> None:
    """Forward runs the units in reverse order of registration, in buckets."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = [Pause(0.0) for _ in range(LAYERS)]
    model: Any = nn.Sequential(*layers)
    model.forward = lambda x: nn.Sequential(*layers[::-1])(x)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model, bucket_bytes=3 * UNIT)
    train(model, 3)
    assert len(model._fsdp_ext_unit.root.impl.buckets()) == 3
    with fsdp_ext.profile(model) as prof:
        train(model, 3)
    check_sums(prof)
    assert Cause.UNKNOWN.value not in prof.summary().causes
    assert {row.units for row in prof.rows() if row.wire > 0} == {"5 to 3", "2 to 0"}


def test_buckets_of_any_order_are_explained() -> None:
    run_ranks(_any_order, 2)


def _mixed_precision_alone() -> None:
    warnings.simplefilter("ignore")
    policy = fsdp_ext.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    train(model, 2)
    with fsdp_ext.profile(model) as prof:
        train(model, 2)
    check_sums(prof)
    found = prof.summary().causes
    # On a busy machine a lane's thread may be late for its copies.
    assert set(found) <= {Cause.COPIES.value, Cause.ISSUED_LATE.value}, found
    assert "nothing was on a wire" in str(prof)


def test_one_rank_that_casts_has_no_wire() -> None:
    run_ranks(_mixed_precision_alone, 1)


def _merged_after_another() -> list[int]:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    if dist.get_rank() == 0:
        model.set_requires_gradient_sync(True)
        with fsdp_ext.profile(model, iterations=1):
            train(model, 2)
    else:
        train(model, 2)
    with fsdp_ext.profile(model) as prof:
        train(model, 3)
    merged = prof.merge().ranks
    # No collective can end before the last rank has begun it.
    for a, b in zip(*merged.values(), strict=True):
        for one, other in zip(a.of("gather"), b.of("gather"), strict=True):
            assert one.nbytes == other.nbytes
            assert max(one.begin, other.begin) <= min(one.end, other.end)
    return [iteration.number for iteration in prof.iterations]


def test_ranks_that_profiled_before_are_merged_by_what_they_profile_together() -> None:
    assert run_ranks(_merged_after_another, 2) == [[1, 2, 3], [1, 2, 3]]


def _nothing_in_common() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    first, last = (2, 1) if dist.get_rank() == 0 else (1, 2)
    with fsdp_ext.profile(model, iterations=1) as prof:
        train(model, first)
    train(model, last)
    with pytest.raises(RuntimeError, match=r"no step that all ranks recorded\. Profile"):
        prof.merge()


def test_ranks_without_a_step_in_common_raise() -> None:
    run_ranks(_nothing_in_common, 2)


def _write_many(path: Path, text: str) -> None:
    for _ in range(100):
        write_text(path, text)


def test_a_file_that_many_threads_write_is_one_of_theirs(tmp_path: Path) -> None:
    texts = [str(i) * 10000 for i in range(4)]
    threads = [
        threading.Thread(target=_write_many, args=(tmp_path / "file", text)) for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in texts
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# - Where the block may begin


def _after_a_forward_alone() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    train(model, 2)
    model(torch.ones(1, WIDTH))  # as an evaluation that forgot no_grad
    with fsdp_ext.profile(model) as prof:
        train(model, 1)
    assert len(prof.iterations) == 1
    check_sums(prof)


def test_a_block_may_follow_a_forward_without_a_backward() -> None:
    run_ranks(_after_a_forward_alone, 2)


# - Wrong use


def _errors() -> None:
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    with pytest.raises(RuntimeError, match="needs a model that has run forward"):
        fsdp_ext.profile(model)
    train(model, 1)
    with pytest.raises(RuntimeError, match="no whole step"), fsdp_ext.profile(model):
        pass
    prof = fsdp_ext.profile(model)
    with pytest.raises(RuntimeError, match="when its with block ends"):
        prof.report()
    with fsdp_ext.profile(model) as outer:
        train(model, 1)
        with pytest.raises(RuntimeError, match="inside another profile's"), prof:
            pass
    check_sums(outer)
    freeze = [lambda: None, lambda: next(model.parameters()).requires_grad_(False)]
    with pytest.raises(RuntimeError, match="replaced, frozen or unfrozen"), fsdp_ext.profile(model):
        train(model, 2, lambda step: freeze[step]())
    train(model, 1)
    with fsdp_ext.profile(model) as again:  # a later profile works as before
        train(model, 1)
    check_sums(again)


def test_wrong_use_raises_and_says_what_to_do() -> None:
    run_ranks(_errors, 1)
