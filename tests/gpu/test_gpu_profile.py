"""A profile of a GPU has the times of events, on one clock with the host."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.devices import IS_EMULATED
from support.launcher import run_ranks
from support.rank_process import OWN_GPU
from torch import nn

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.optim import SGD
from fsdp_ext.profiler.causes import Cause

WIDTH, ROWS = (128, 64) if IS_EMULATED else (2048, 4096)
LAYERS = 6


def _make(link: Link, **options: Any) -> Any:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    transport = Simulated(8, link)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    for layer in model:
        fully_shard(layer, transport=transport)
    options.setdefault("bucket_bytes", 0)
    return fully_shard(model, transport=transport, **options)


def _train(model: Any, steps: int) -> None:
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for _ in range(steps):
        model(x).square().mean().backward()


def _profiled(model: Any, steps: int = 4) -> Any:
    _train(model, 3)
    torch.cuda.synchronize()
    with fsdp_ext.profile(model) as prof:
        _train(model, steps)
    summary = prof.summary()
    parts = (summary.compute, summary.exposed, summary.optimizer, summary.other)
    assert sum(parts) == pytest.approx(summary.step)
    assert sum(summary.causes.values()) == pytest.approx(summary.exposed, abs=1e-9)
    return prof


def _in_order() -> None:
    start = time.monotonic()
    prof = _profiled(_make(Link("fast", alpha=1e-4, beta=1e12)))
    end = time.monotonic()
    assert len(prof.iterations) == 4
    for iteration in prof.iterations:
        # By the host's clock, which is matched to the GPU's within some microseconds.
        assert start - 1e-4 <= iteration.begin <= iteration.end <= end + 1e-4
        for span in iteration.spans:
            assert span.begin <= span.end
            assert span.lead > -1e-4
        for work in ("gather", "reduce"):
            spans = iteration.of(work)
            assert len(spans) >= LAYERS
            for before, after in itertools.pairwise(spans):
                assert before.end <= after.begin + 1e-6
            for span in spans:
                assert span.issued <= span.begin + 1e-4
                assert span.seconds >= 0.9e-4  # alpha


@pytest.mark.timeout(90)
def test_times_are_in_order_and_by_the_hosts_clock() -> None:
    run_ranks(_in_order, 1, timeout=80.0, device="cuda")


def _slow_wire() -> dict[str, float]:
    return _profiled(_make(Link("slow", alpha=2e-2, beta=1e12))).summary().causes


@pytest.mark.timeout(90)
def test_a_slow_wire_is_what_it_is_called() -> None:
    (causes,) = run_ranks(_slow_wire, 1, timeout=80.0, device="cuda")
    del causes[Cause.FIRST.value], causes[Cause.LAST.value]
    assert max(causes, key=lambda name: causes[name]) == Cause.BANDWIDTH.value


def _attached() -> None:
    model = _make(Link("fast", alpha=2e-3, beta=1e12), bucket_bytes=2 * WIDTH * WIDTH * 4)
    SGD(model.parameters(), lr=0.01).attach(model)
    prof = _profiled(model)
    rows = [row for row in prof.rows() if row.operation == "optimizer"]
    assert [row.phase for row in rows] == ["backward"] * len(rows)
    assert sum(row.collectives for row in rows) == pytest.approx(LAYERS)
    assert prof.summary().optimizer == 0  # the lane runs the updates
    for iteration in prof.iterations:
        lane = iteration.lane("reduce")
        updated = [span for span in lane if span.work == "update"]
        assert len(updated) == LAYERS
        for span in updated:  # updates run between their bucket's reduction and the next one's
            before = [one for one in lane if one.work == "reduce" and one.begin < span.begin]
            assert before[-1].units == span.units
            assert before[-1].end <= span.begin + 1e-6
        awaited = max(span.end for span in updated)
        assert iteration.of("wait (reduction)")[-1].end >= awaited - 1e-6


@pytest.mark.timeout(90)
def test_updates_of_an_attached_optimizer_are_on_the_lane() -> None:
    run_ranks(_attached, 1, timeout=80.0, device="cuda")


def _own_stream() -> None:
    model = _make(Link("fast", alpha=1e-4, beta=1e12))
    _train(model, 3)
    stream = torch.cuda.Stream()
    with fsdp_ext.profile(model) as prof:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _train(model, 2)
    assert len(prof.iterations) == 2
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.timeout(90)
def test_steps_on_a_stream_of_the_users_own_are_recorded() -> None:
    run_ranks(_own_stream, 1, timeout=80.0, device="cuda")


def _tuned() -> None:
    model = _make(Link("slow", alpha=2e-3, beta=1e12), bucket_bytes=None)
    x = torch.randn(ROWS // 4, WIDTH, device="cuda")
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    result = fsdp_ext.tune(model, x, steps=2, verbose=False)
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    assert result.chosen in result.measured
    assert "predicted simulated ms" in str(result)


@pytest.mark.timeout(120)
def test_tuning_leaves_the_model_as_it_was() -> None:
    run_ranks(_tuned, 1, timeout=110.0, device="cuda")


def _tuned_over_nccl() -> dict[str, set[str]]:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model, bucket_bytes=0, prefetch=1)
    x = torch.randn(ROWS // 4, WIDTH, device="cuda")
    result = fsdp_ext.tune(model, x, steps=2, verbose=False)
    text = " ".join(str(result).split())
    for lane in result.policies:
        fastest = min(lane.seconds, key=lane.seconds.__getitem__)
        told = f"set {lane.variable}=cta_policy={fastest} in the environment of the next run"
        assert (told in text) == (fastest != "default")
        of_a_bucket = 2 * WIDTH * (WIDTH + 1) * 4 / result.chosen.buckets
        assert lane.nbytes == pytest.approx(of_a_bucket, rel=0.05)  # parameters are padded
    model(x).sum().backward()  # on its own lanes
    return {lane.variable: set(lane.seconds) for lane in result.policies}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, set()),
        ({"FSDP_EXT_NCCL_REDUCE": "cta_policy=default"}, {"FSDP_EXT_NCCL_REDUCE"}),
        ({"FSDP_EXT_NCCL_REGISTER": "0"}, {"zero"}),
    ],
    ids=["all", "one_is_set", "unregistered"],
)
def test_tune_times_the_policies_that_can_be_set(
    variables: dict[str, str], missing: set[str]
) -> None:
    if not IS_EMULATED:
        pytest.skip("needs two GPUs of one node, as the emulated one has")
    of_lanes = {
        "FSDP_EXT_NCCL_GATHER": {"default", "efficiency", "zero"},
        "FSDP_EXT_NCCL_REDUCE": {"default", "efficiency"},
    }
    expected = {
        lane: policies - missing for lane, policies in of_lanes.items() if lane not in missing
    }
    own_gpu = {**OWN_GPU, "EMULATED_GPU_DEVICES": "2", **variables}
    found = run_ranks(_tuned_over_nccl, 2, timeout=110.0, device="cuda", variables=own_gpu)
    assert found == [expected, expected]
