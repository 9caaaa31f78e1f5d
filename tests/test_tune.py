"""``fsdp_ext.tune``: what it measures, chooses, applies and leaves alone, but no timings."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.profiler.recording import Iteration, Span
from fsdp_ext.sharding.auto import remember
from fsdp_ext.sharding.settings import Choice, Scope
from fsdp_ext.tuner.costs import _figures
from fsdp_ext.tuner.race import STAGES
from fsdp_ext.tuner.result import Candidate, Tuning
from fsdp_ext.tuner.trial import Trial

WIDTH = 64
LAYERS = 6
LINK = Link("a link", alpha=50e-6, beta=1e9)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.linear(x)).relu())


def make(transport: Any = None, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh, transport=transport)
    return fully_shard(model, mesh=mesh, transport=transport, **options)


def make_units() -> Any:
    model: Any = nn.Sequential(*(Layer() for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return model


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def tuned(model: Any, **options: Any) -> Tuning:
    return fsdp_ext.tune(model, batch(), steps=2, verbose=False, **options)


def in_use(model: Any) -> Choice:
    settings = model._fsdp_ext_unit.root.settings
    return Choice(settings.bucket_bytes[0], settings.prefetch, settings.stays_unsharded)


# - On simulated ranks


def _with_replicas() -> None:
    dist.destroy_process_group()
    between = Link("between", alpha=200e-6, beta=1e8)
    transport = Simulated(16, LINK, rank=12, replicas=2, replica_link=between)
    transport.init_process_group()
    mesh = init_device_mesh("cpu", (2, 8))
    model = make(transport, mesh)
    result = tuned(model)
    assert in_use(model) == result.chosen.choice
    assert (result.costs.link, result.costs.replica_link) == (LINK, between)
    assert "all-reduces 200 us + 2 S / 0.10 GB/s" in " ".join(str(result).split())
    # Without buckets there are six all-reduces, and each of them has the latency.
    slow = next(one for one in result.measured if one.choice == result.before.choice)
    assert slow.predicted >= slow.buckets * between.alpha
    planned = fsdp_ext.plan(model)
    assert planned.memory.peak == result.chosen.memory
    # A model of the same shape on a mesh of other replicas starts with its own defaults.
    auto = {"bucket_bytes": "auto", "prefetch": "auto"}
    again = make(transport, mesh, **auto)
    again(batch())
    assert in_use(again) == result.chosen.choice
    model.set_requires_all_reduce(False)
    with pytest.raises(ValueError, match=r"sum gradients over replicas.*set_requires_all_reduce"):
        tuned(model)


def test_all_reduces_over_replicas_are_measured_and_predicted() -> None:
    run_ranks(_with_replicas, 1)


def _tells_gains_from_noise(result: Tuning) -> None:
    seconds = result.before.measured or 0.0
    for noise, is_noise in ((0.02, True), (0.01, False)):
        chosen = Candidate(Choice(1, 4), 1, 0, seconds, 0.95 * seconds, noise * seconds)
        before = replace(result.before, noise=noise * seconds)
        text = str(replace(result, chosen=chosen, before=before))
        remark = f"but repeats differ by {2 * 2**0.5 * noise:.1%}, so the gain may be noise"
        assert (remark in text) == is_noise
        assert ("noise" in text) == is_noise


def _says_why_predictions_are_off(result: Tuning) -> None:
    seconds = result.before.measured or 0.0
    for predicted, load, why in (
        (0.2, 9.5, "steps took longer than the costs that were measured"),
        (2.0, 0.5, "steps took less time than"),
        (1.1, 9.5, None),
    ):
        chosen = replace(result.before, predicted=predicted * seconds)
        text = " ".join(str(replace(result, chosen=chosen, load=load)).split())
        assert f"off by {predicted - 1:+.0%}" in text
        assert why is None or why in text
        assert ("load average of this machine is 9.5" in text) == (why is not None and load > 1)
        assert why is not None or "steps took" not in text


def _applies() -> None:
    dist.destroy_process_group()
    model = make(Simulated(8, LINK))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.random.get_rng_state()
    result = tuned(model)
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert in_use(model) == result.chosen.choice
    assert result.chosen in result.measured
    assert result.before in result.measured
    assert result.chosen.choice.stays_unsharded == ()  # without a memory limit
    assert result.considered > 20
    assert result.costs.link == LINK
    assert all(forward > 0 and backward > 0 for forward, backward in result.costs.compute[1:])
    # The next step runs as planned.
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    core = model._fsdp_ext_unit.root.core
    assert len(core.buckets()) == result.chosen.buckets
    assert core.memory()["ring_slots"] <= result.chosen.choice.prefetch + 1
    text = str(result)
    assert all((one.noise or 0.0) > 0 for one in result.measured)
    assert "chosen" in text
    assert "predicted simulated ms" in text
    assert f"{result.considered} settings were considered" in text
    _tells_gains_from_noise(result)
    _says_why_predictions_are_off(result)


def test_what_is_chosen_is_applied_and_nothing_else_changes() -> None:
    run_ranks(_applies, 1)


def _measured_fastest() -> None:
    """The link is so slow that compute does not matter."""
    dist.destroy_process_group()
    alpha = 5e-3
    model = make(Simulated(8, Link("slow", alpha=alpha, beta=1e12)), bucket_bytes="auto")

    def step(trial: Trial) -> float:
        of_trial(trial)
        # What each bucket waits for, however busy the machine is: two gathers and a reduction.
        return float(3 * alpha * len(model._fsdp_ext_unit.root.core.buckets()))

    of_trial = Trial.step
    with mock.patch.object(Trial, "step", step):
        result = tuned(model)
    fewest = min(one.buckets for one in result.measured)
    assert result.chosen.buckets == fewest < LAYERS
    assert result.chosen.measured == min(one.measured or 0.0 for one in result.measured)


def test_few_buckets_are_chosen_if_latency_dominates() -> None:
    run_ranks(_measured_fastest, 1)


def _within_memory() -> None:
    dist.destroy_process_group()
    # Reductions as slow as gathers would overlap them.
    slow = Link("slow", alpha=5e-3, beta=1e12, reduce_alpha=1e-6)
    model = make(Simulated(8, slow), bucket_bytes=0, prefetch=1)
    memory = tuned(model).chosen.memory
    model = make(Simulated(8, slow), bucket_bytes=0, prefetch=1)
    plenty = tuned(model, memory_limit=10 * memory)
    assert in_use(model) == plenty.chosen.choice
    # Otherwise gathers in backward would be exposed.
    assert len(plenty.chosen.choice.stays_unsharded) > 0
    model = make(Simulated(8, slow), bucket_bytes=0, prefetch=1)
    tight = tuned(model, memory_limit=memory)
    assert tight.chosen.memory <= memory
    assert tight.too_large > 0
    model = make(Simulated(8, slow))
    with pytest.raises(ValueError, match=r"memory_limit of at least [\d,]+ bytes, which"):
        tuned(model, memory_limit=1000)
    assert in_use(model) == in_use(make_and_run(slow))


def make_and_run(link: Link) -> Any:
    model = make(Simulated(8, link))
    model(batch()).sum().backward()
    return model


@pytest.mark.exhaustive
def test_units_stay_unsharded_as_far_as_memory_allows() -> None:
    run_ranks(_within_memory, 1)


def _numbers_stay() -> None:
    dist.destroy_process_group()
    model = make(Simulated(8, LINK), bucket_bytes=3 * WIDTH * WIDTH * 4, prefetch=2)
    result = tuned(model)
    for one in result.measured:
        assert one.choice.bucket_bytes == 3 * WIDTH * WIDTH * 4
        assert one.choice.prefetch == 2


def test_what_the_user_has_set_stays() -> None:
    run_ranks(_numbers_stay, 1)


def _auto() -> None:
    dist.destroy_process_group()
    auto = {"bucket_bytes": "auto", "prefetch": "auto"}
    transport = Simulated(8, Link("slow", alpha=5e-3, beta=1e12))
    first = make(transport, **auto)
    first(batch())
    default = in_use(first)
    assert default == in_use(make_and_run(transport.link))
    chosen = tuned(first).chosen.choice
    second = make(transport, **auto)
    second(batch())
    assert in_use(second) == chosen
    assert in_use(make_and_run(transport.link)) == default  # it did not ask for "auto"
    next(first.parameters()).requires_grad_(False)
    first(batch())  # the root is built again and keeps the choice
    assert in_use(first) == chosen


def test_a_model_that_looks_the_same_begins_with_what_was_chosen() -> None:
    run_ranks(_auto, 1)


def _remembered() -> None:
    dist.destroy_process_group()
    transport = Simulated(8, LINK)
    auto: Any = {"bucket_bytes": "auto", "prefetch": "auto"}

    def begins(**options: Any) -> Choice:
        model = make(transport, **options)
        model(batch())
        return in_use(model)

    model = make(transport, **auto)
    model(batch())
    root = model._fsdp_ext_unit.root
    default = in_use(model)
    chosen = Choice(12345, 3, (1, 2))
    remember(root.units, root.lanes.transport, chosen, memory_known=True)
    assert begins(**auto) == chosen
    # Units that stay unsharded may not fit in memory with other sizes and depths.
    assert begins(bucket_bytes="auto") == Choice(12345, default.prefetch)
    assert begins(bucket_bytes=77, prefetch="auto") == Choice(77, 3)
    assert begins(**auto, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)) == default
    assert begins(**auto, reshard_after_forward=True) == default
    remember(root.units, root.lanes.transport, chosen, memory_known=False)
    assert begins(**auto) == Choice(12345, 3)


def test_a_remembered_choice_reaches_models_of_the_same_dtypes_and_settings_only() -> None:
    run_ranks(_remembered, 1)


# - What stays


class Assigns(nn.Module):
    """A buffer that forward assigns."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + x.detach().mean(0)
        return self.linear(x) + self.average


def _nothing_trains(fails: bool) -> None:
    dist.destroy_process_group()
    model: Any = nn.Sequential(*(Assigns() for _ in range(4)))
    for layer in model:
        fully_shard(layer, transport=Simulated(8, LINK))
    fully_shard(model, transport=Simulated(8, LINK))
    stepped = []

    def optimize(parameter: Any) -> None:
        stepped.append(None)
        parameter.to_local().add_(1.0)
        parameter.grad = None

    x = batch().requires_grad_()
    gradient = x.grad = torch.ones_like(x)
    before = model.eval()(x).detach()
    for layer in model:
        layer.average = torch.ones(WIDTH)
    shards = [parameter.to_local().clone() for parameter in model.parameters()]
    buffers = list(model.buffers())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: optimize(p) if p.grad is not None else None
        )
    calls = []

    def loss(y: Tensor) -> Tensor:
        calls.append(None)
        if fails and len(calls) > 10:
            raise RuntimeError("a loss that fails")
        return y.sum()

    error = pytest.raises(RuntimeError, match="fails") if fails else contextlib.nullcontext()
    with error:
        fsdp_ext.tune(model, x, loss=loss, steps=2, verbose=False)
    assert len(stepped) > len(shards)
    assert all(map(torch.equal, shards, (p.to_local() for p in model.parameters())))
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(buffer, torch.ones(WIDTH)) for buffer in buffers)
    assert x.grad is gradient
    assert torch.equal(gradient, torch.ones_like(x))
    assert (
        model._fsdp_ext_unit.root.decision is None
        or model._fsdp_ext_unit.root.decision.scope is Scope.OPEN
    )
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_and_buffers_that_change_are_restored(fails: bool) -> None:
    run_ranks(_nothing_trains, 1, fails)


# - Memory


class Steps:
    """Records what each step of a trial ran with."""

    def __init__(self, model: Any) -> None:
        self.memory: list[int] = []
        self.buckets: list[int] = []
        self._model = model
        self._step = Trial.step

    def __enter__(self) -> Steps:
        def step(trial: Trial) -> float:
            taken = self._step(trial)
            core = self._model._fsdp_ext_unit.root.core
            self.memory.append(core.memory()["ring_bytes"])
            self.buckets.append(len(core.buckets()))
            return taken

        Trial.step = step  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Trial.step = self._step  # type: ignore[method-assign]


def _within_the_limit() -> None:
    dist.destroy_process_group()
    transport = Simulated(8, Link("slow", alpha=1e-3, beta=1e12))
    model = make(transport, bucket_bytes=0, prefetch=2)
    memory = fsdp_ext.plan(model).memory
    with Steps(model) as steps:
        result = tuned(model, memory_limit=memory.peak)
    # Larger buckets reduce at least as much as single units, so slots may take this much.
    assert max(steps.memory) <= memory.ring + memory.staging + memory.kept_unsharded
    assert all(one.memory <= memory.peak for one in result.measured)
    result = tuned(make(Simulated(8, Link("fast", alpha=1e-9, beta=1e12))))
    assert result.too_large > 0
    assert result.before.buckets > 1
    assert all(one.memory <= 1.25 * result.before.memory for one in result.measured)


def test_no_step_takes_more_than_the_limit() -> None:
    run_ranks(_within_the_limit, 1)


def _probes_are_of_their_own() -> None:
    dist.destroy_process_group()
    model = make(Simulated(8, LINK), bucket_bytes=10**9)
    with Steps(model) as steps:
        result = tuned(model)
    assert steps.buckets[0] == LAYERS + 1  # each unit is first measured by itself
    assert 1 < len(set(steps.buckets)) <= 3
    assert steps.buckets[-1] == result.chosen.buckets < LAYERS
    assert all(forward > 0 < backward for forward, backward in result.costs.compute[1:])


def test_costs_are_measured_with_buckets_of_their_own_where_the_user_has_set_a_size() -> None:
    run_ranks(_probes_are_of_their_own, 1)


def test_recomputation_is_part_of_backward() -> None:
    spans = (
        Span("forward", "forward", -1, -1, 0, 1, 5),
        Span("unit forward", "forward", 1, 1, 0, 2, 4),
        Span("backward", "backward", -1, -1, 0, 6, 20),
        Span("unit forward", "backward", 1, 1, 0, 7, 9),
        Span("unit backward", "backward", 1, 1, 0, 9, 14),
    )
    figures = _figures([Iteration(1, spans, 21)])
    assert figures.compute == {("unit forward", 1): 2, ("unit backward", 1): 7}
    assert figures.between == 1


def test_time_on_a_wire_that_both_lanes_share_counts_half() -> None:
    spans = (
        Span("forward", "forward", -1, -1, 0, 1, 5),
        Span("gather", "forward", 1, 1, 100, 1, 3),
        Span("backward", "backward", -1, -1, 0, 6, 20),
        Span("reduce", "backward", 2, 2, 50, 8, 14),
        Span("gather", "backward", 1, 1, 200, 8, 12),
    )
    wire = {("gather", 100): 2, ("gather", 200): 2, ("reduce", 50): 4}
    assert _figures([Iteration(1, spans, 21)], one_wire=True).wire == wire


def _recomputes() -> None:
    dist.destroy_process_group()
    model: Any = models.Recomputed(inside=False, around=True, use_reentrant=False)
    for block in model.blocks:
        fully_shard(block, transport=Simulated(2, LINK))
    fully_shard(model, transport=Simulated(2, LINK))
    x = torch.randn(4, models.DIM)
    for _ in range(2):
        model(x).sum().backward()
    with fsdp_ext.profile(model, iterations=1) as prof:
        model(x).sum().backward()
    phases = [span.phase for span in prof.iterations[0].of("unit forward") if span.first > 0]
    assert sorted(phases) == ["backward"] * 3 + ["forward"] * 3


def test_a_recomputed_forward_is_of_the_phase_that_needs_it() -> None:
    run_ranks(_recomputes, 1)


# - On real ranks


def _make_on(shape: tuple[int, ...]) -> Any:
    return make(mesh=init_device_mesh("cpu", shape))


def _on_ranks(shape: tuple[int, ...]) -> tuple[Choice, list[Tensor], str]:
    model = _make_on(shape)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = fsdp_ext.tune(model, batch(), steps=2, loss=lambda y: y.square().mean())
    return in_use(model), _trained(model), out.getvalue() + str(result)


def _without(shape: tuple[int, ...]) -> list[Tensor]:
    return _trained(_make_on(shape))


def _trained(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("shape", [(2,), *exhaustive((2, 1), (2, 2))])
def test_ranks_choose_the_same_and_train_as_without(shape: tuple[int, ...]) -> None:
    ranks = math.prod(shape)
    (choice, parameters, printed), *others = run_ranks(_on_ranks, ranks, shape)
    assert printed.count("settings were considered") == 2  # printed once by tune itself
    for other, _, silent in others:
        assert choice == other
        assert silent.count("settings were considered") == 1
    for got, want in zip(parameters, run_ranks(_without, ranks, shape)[0], strict=True):
        assert torch.equal(got, want)


def _differ() -> tuple[Choice, bool, list[str]]:
    """One rank alone has less memory, or makes a mistake."""
    rank = dist.get_rank()
    model = make(bucket_bytes=0)
    limit = fsdp_ext.plan(model).memory.peak
    options: dict[str, Any] = {"verbose": False, "steps": 2}
    result = fsdp_ext.tune(model, batch(), memory_limit=limit * (2 - rank), **options)
    messages = []

    def loss(y: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("no label")
        return y.sum()

    for wrong in ({"loss": loss}, {"optimizer_states": -rank}, {"optimizer_states": rank}):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            fsdp_ext.tune(model, batch(), **{**options, **wrong})
        messages.append(f"{type(raised.value).__name__}: {raised.value}")
        assert in_use(model) == result.chosen.choice
        assert all(parameter.grad is None for parameter in model.parameters())
    return result.chosen.choice, result.chosen.memory <= limit, messages


def test_ranks_that_differ_choose_the_same_or_all_raise() -> None:
    (choice, fits, messages), other = run_ranks(_differ, 2)
    assert (choice, fits, messages) == other
    assert fits
    start = "tune failed on rank 1"
    assert f"RuntimeError: {start}, in the loss: KeyError: 'no label'" in messages[0]
    assert f"ValueError: {start}, in its arguments: ValueError" in messages[1]
    assert "got different optimizer_states on the ranks: 0, 1" in messages[2]


def _runs_out() -> tuple[list[Choice], Choice]:
    model = make(bucket_bytes=0)
    before = Choice(0, 1)
    plain = Trial.step

    def step(trial: Trial) -> float:
        taken = plain(trial)
        root = model._fsdp_ext_unit.root
        decision = root.decision
        is_tried = decision is not None and decision.scope is Scope.OPEN
        tried = is_tried and decision.choice != before
        if dist.get_rank() == 1 and tried:
            raise torch.OutOfMemoryError("out of memory")
        return taken

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_ext")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with mock.patch.object(Trial, "step", step):
            result = fsdp_ext.tune(model, batch(), steps=2, memory_limit=10**9, verbose=False)
    finally:
        logger.removeHandler(handler)
    if dist.get_rank() == 0:
        assert sum("measured round" in line for line in said) == sum(rounds for rounds, _ in STAGES)
        assert any("prefetch=" in line and "is dropped" in line for line in said)
    return [one.choice for one in result.measured], result.chosen.choice


def test_a_setting_that_one_rank_has_no_memory_for_is_dropped_on_all() -> None:
    assert run_ranks(_runs_out, 2) == [([Choice(0, 1)], Choice(0, 1))] * 2


# - Wrong use


class NoFloats(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).argmax(dim=1)


def _errors() -> None:
    with pytest.raises(TypeError, match="Linear that fully_shard was not applied to"):
        fsdp_ext.tune(nn.Linear(WIDTH, WIDTH), batch())
    model = make()
    with pytest.raises(ValueError, match=r"got steps=1\. Pass from 2 to"):
        fsdp_ext.tune(model, batch(), steps=1)
    model(batch()).sum().backward()
    with pytest.raises(ValueError, match=r"have gradients.*Call optimizer\.zero_grad\(\)"):
        fsdp_ext.tune(model, batch())
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match=r"gradients that are not reduced.*Run a backward with"):
        fsdp_ext.tune(model, batch())
    model.reset_iter_state()
    with pytest.raises(TypeError, match="NoFloats that fully_shard was not applied to"):
        fsdp_ext.tune(NoFloats(model), batch())
    with pytest.raises(ValueError, match=r"got a FSDPLayer inside a FSDPSequential, which is"):
        fsdp_ext.tune(model[0], batch())
    with pytest.raises(ValueError, match=r"no floating-point tensor .* Pass loss="):
        fsdp_ext.tune(fully_shard(NoFloats(make_units())), batch())
    for limit in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"got memory_limit={limit}"):
            fsdp_ext.tune(model, batch(), memory_limit=limit)
    with pytest.raises(ValueError, match="got optimizer_states=-1"):
        fsdp_ext.tune(model, batch(), optimizer_states=-1)
    with pytest.raises(TypeError, match="got loss='mean'"):
        fsdp_ext.tune(model, batch(), loss="mean")
    with pytest.raises(TypeError, match="got a float from loss"):
        fsdp_ext.tune(model, batch(), loss=lambda y: 1.0)
    with pytest.raises(ValueError, match=r"got a tensor of shape \(8, 64\) with req"):
        fsdp_ext.tune(model, batch(), loss=lambda y: y)
    model[0].set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match=r"Call set_requires_gradient_sync\(True\) before"):
        fsdp_ext.tune(model, batch())
    model[0].set_requires_gradient_sync(True)
    model.set_reshard_after_backward(False)
    with pytest.raises(ValueError, match=r"Call set_reshard_after_backward\(True\) before"):
        fsdp_ext.tune(model, batch())
    model.set_reshard_after_backward(True)
    model(batch()).sum().backward()
    with fsdp_ext.profile(model) as prof:
        model(batch()).sum().backward()
        model.zero_grad()
        with pytest.raises(ValueError, match=r"with block of fsdp_ext\.profile\. Call it outside"):
            fsdp_ext.tune(model, batch())
    assert len(prof.iterations) == 1
    model.set_manual_backward_finalization(True)
    with pytest.raises(ValueError, match=r"set_manual_backward_finalization\(False\) before"):
        fsdp_ext.tune(model, batch())
    model.set_manual_backward_finalization(False)
    model.set_is_last_backward(False)
    with pytest.raises(ValueError, match=r"Call set_is_last_backward\(True\) before"):
        fsdp_ext.tune(model, batch())
    for name in ("bucket_bytes", "prefetch"):
        with pytest.raises(ValueError, match=f"{name} is 'large'.*'auto' or None"):
            make(**{name: "large"})


def test_wrong_use_raises_and_says_what_to_do() -> None:
    run_ranks(_errors, 1)
