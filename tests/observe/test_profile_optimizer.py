"""A profile shows the optimizer's time: of each bucket if it is attached, or of ``step()``."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.profiling import LAYERS, UNIT, WIDTH, check_sums, make, train

import fsdp_ext
from fsdp_ext import Link, Simulated
from fsdp_ext.optim.flat_step import FlatStep
from fsdp_ext.profiler.causes import Cause
from fsdp_ext.profiler.recording import own_compute

SLEEP = 0.01  # seconds of each step of the optimizer
STEPS = 3


class SlowSGD(torch.optim.SGD):
    """Sleeps in each step."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(SLEEP)
        return super().step(closure)


class SlowFlatSGD(FlatStep, SlowSGD):
    """Can be attached."""


def _attached(path: Path, simulates: bool) -> None:
    warnings.simplefilter("ignore")
    transport = None
    if simulates:
        dist.destroy_process_group()
        transport = Simulated(8, Link("fast", 1e-3, 1e12))
    model = make(transport, compute=0.0, bucket_bytes=2 * UNIT)
    optimizer = SlowFlatSGD(model.parameters(), lr=0.0)
    optimizer.attach(model)
    train(model, 3)
    with fsdp_ext.profile(model) as prof:
        train(model, STEPS)
    check_sums(prof)
    rows = [row for row in prof.rows() if row.operation == "optimizer"]
    assert [row.units for row in rows] == ["0 to 1", "2 to 3", "4 to 5"]
    for row in rows:
        assert (row.phase, row.collectives, row.nbytes) == ("backward", pytest.approx(2), 0)
        assert row.wire == row.exposed == row.causes[Cause.OPTIMIZER.value]  # on the host
        assert row.wire >= 2 * SLEEP
    summary = prof.summary()
    assert summary.optimizer == pytest.approx(sum(row.exposed for row in rows))
    assert Cause.OPTIMIZER.value not in summary.causes
    for iteration in prof.iterations:
        # Both are without the optimizer.
        assert sum(own for _, own in own_compute(iteration)) <= iteration.compute * (1 + 1e-6)
        reduced = {span.units: span.end for span in iteration.of("reduce")}
        updates = iteration.of("step")
        assert [span.units for span in updates] == [(5, 6)] * 2 + [(3, 4)] * 2 + [(1, 2)] * 2
        assert all(span.begin >= reduced[span.units] for span in updates)
        for before, after in itertools.pairwise(updates):
            assert before.end <= after.begin
    by_unit = [row for row in prof.rows("unit") if row.operation == "optimizer"]
    assert [row.units for row in by_unit] == [str(number) for number in range(LAYERS)]
    assert "optimizer" in prof.report()
    prof.save_trace(path / f"{prof.rank}.json")
    prof.plot(path / f"{prof.rank}.svg")


@pytest.mark.parametrize("simulates", [False, True])
def test_updates_in_backward_are_the_optimizers_time(tmp_path: Path, simulates: bool) -> None:
    run_ranks(_attached, 1 if simulates else 2, tmp_path, simulates)
    events = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    updates = [event for event in events if event["name"] == "step 2 to 3"]
    assert len(updates) == 2 * STEPS
    assert all(event["args"]["after its reduction (us)"] >= 0 for event in updates)


def _after_backward() -> None:
    warnings.simplefilter("ignore")
    model, other = make(compute=0.0), torch.nn.Linear(2, 2)
    torch.optim.SGD(other.parameters(), lr=0.0)  # PyTorch calls hooks for its step, too, now
    of_model, of_other = (SlowSGD(each.parameters(), lr=0.0) for each in (model, other))

    def step() -> None:
        train(model, 1)
        of_other.step()
        of_model.step()

    step()
    with fsdp_ext.profile(model) as prof:
        for _ in range(STEPS):
            step()
    check_sums(prof)
    (row,) = [row for row in prof.rows() if row.operation == "optimizer"]
    assert (row.units, row.phase, row.collectives) == ("all units", "other", pytest.approx(1))
    summary = prof.summary()
    assert SLEEP <= summary.optimizer == pytest.approx(row.exposed)
    assert summary.other >= SLEEP  # the other model's
    of_model.step()  # nothing is recorded behind the block
    assert len(prof.iterations) == STEPS


def _with_closures(runs_forward: bool) -> None:
    """A step whose closure runs forward or backward is not recorded: its time would count twice."""
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    optimizer = SlowSGD(model.parameters(), lr=0.0)
    train(model, 1)
    with fsdp_ext.profile(model) as prof:
        for _ in range(STEPS):
            if runs_forward:
                optimizer.step(lambda: train(model, 1))
            else:
                optimizer.step(model(torch.ones(1, WIDTH)).sum().backward)
    check_sums(prof)
    assert len(prof.iterations) == STEPS
    assert prof.summary().optimizer == 0


def _with_parameters_unfrozen_inside() -> None:
    """A profile ends with an error, and without one while the block's own error passes."""
    warnings.simplefilter("ignore")
    model = make(compute=0.0)
    optimizer = SlowSGD(model.parameters(), lr=0.0)
    frozen = list(model.parameters())[:3]
    for param in frozen:
        param.requires_grad_(False)
    train(model, 1)

    def unfreeze(error: Exception | None = None) -> None:
        frozen.pop().requires_grad_(True)
        train(model, 1)
        optimizer.step()
        if error is not None:
            raise error

    with pytest.raises(RuntimeError, match="lost track of the model"), fsdp_ext.profile(model):
        unfreeze()
    with pytest.raises(KeyError, match="mine"), fsdp_ext.profile(model):
        unfreeze(KeyError("mine"))
    late = fsdp_ext.profile(model)
    unfreeze()
    with pytest.raises(RuntimeError, match="lost track of the model"), late:
        pass
    with fsdp_ext.profile(model) as prof:
        train(model, 1)
    assert len(prof.iterations) == 1


@pytest.mark.parametrize(
    "work",
    [
        _after_backward,
        partial(_with_closures, runs_forward=True),
        partial(_with_closures, runs_forward=False),
        _with_parameters_unfrozen_inside,
    ],
)
def test_steps_after_backward(work: Any) -> None:
    run_ranks(work, 1)
