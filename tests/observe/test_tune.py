"""``fsdp_ext.tune``: what it measures, chooses, applies and leaves alone, but no timings."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.profiler.recording import Iteration, Span
from fsdp_ext.sharding.params.settings import Choice
from fsdp_ext.tuner.candidates import shortlist
from fsdp_ext.tuner.costs import _fit, seconds_of
from fsdp_ext.tuner.result import Candidate, Tuning
from fsdp_ext.tuner.trial import Trial, left_as_it_was

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
    # Without buckets there are six all-reduces, and each of them has the latency.
    slow = next(one for one in result.measured if one.choice == result.before.choice)
    assert slow.predicted >= slow.buckets * between.alpha
    planned = fsdp_ext.plan(model)
    assert planned.memory.peak == result.chosen.memory
    model.set_requires_all_reduce(False)
    with pytest.raises(ValueError, match=r"Call set_requires_all_reduce\(True\) before"):
        tuned(model)


def test_all_reduces_over_replicas_are_measured_and_predicted() -> None:
    run_ranks(_with_replicas, 1)


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
    assert {result.chosen, result.before} <= set(result.measured)
    assert len(result.measured) == 4  # the one before and the best three others
    assert result.chosen.choice.stays_unsharded == ()  # without a memory limit
    assert result.considered > 20
    assert result.costs.link == LINK
    assert all(unit.forward > 0 < unit.backward for unit in result.costs.compute[1:])
    # The next step runs as planned.
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    impl = model._fsdp_ext_unit.root.impl
    assert len(impl.buckets()) == result.chosen.buckets
    assert impl.memory()["ring_slots"] <= result.chosen.choice.prefetch + 1
    text = str(result)
    assert f"chosen: {result.chosen.choice}" in " ".join(text.split())
    assert "predicted simulated ms" in text
    assert f"{result.considered} settings were considered" in text


def test_what_is_chosen_is_applied_and_nothing_else_changes() -> None:
    run_ranks(_applies, 1)


def _measured_fastest() -> None:
    """The link is so slow that compute does not matter."""
    dist.destroy_process_group()
    alpha = 5e-3
    model = make(Simulated(8, Link("slow", alpha=alpha, beta=1e12)))

    def step(trial: Trial, *guard: Any) -> float:
        of_trial(trial, *guard)
        # What each bucket waits for, however busy the machine is: two gathers and a reduction.
        return float(3 * alpha * len(model._fsdp_ext_unit.root.impl.buckets()))

    of_trial = Trial.step
    with mock.patch.object(Trial, "step", step):
        result = tuned(model)
    fewest = min(one.buckets for one in result.measured)
    assert result.chosen.buckets == fewest < LAYERS
    assert result.chosen.measured == min(one.measured for one in result.measured)


@pytest.mark.exhaustive
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


def _rebuilt() -> None:
    dist.destroy_process_group()
    transport = Simulated(8, Link("slow", alpha=5e-3, beta=1e12))
    model = make(transport)
    chosen = tuned(model).chosen.choice
    next(model.parameters()).requires_grad_(False)
    model(batch())
    assert in_use(model) == chosen
    assert in_use(make_and_run(transport.link)) != chosen


@pytest.mark.exhaustive
def test_a_root_that_is_built_again_keeps_the_choice() -> None:
    run_ranks(_rebuilt, 1)


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


def _buffers_change(fails: bool) -> None:
    dist.destroy_process_group()
    model: Any = nn.Sequential(*(Assigns() for _ in range(4)))
    for layer in model:
        fully_shard(layer, transport=Simulated(8, LINK))
    fully_shard(model, transport=Simulated(8, LINK))
    x = batch().requires_grad_()
    gradient = x.grad = torch.ones_like(x)
    before = model.eval()(x).detach()
    for layer in model:
        layer.average = torch.ones(WIDTH)
    shards = [parameter.to_local().clone() for parameter in model.parameters()]
    buffers = list(model.buffers())
    calls = []

    def loss(y: Tensor) -> Tensor:
        calls.append(None)
        if fails and len(calls) > 10:
            raise RuntimeError("a loss that fails")
        return y.sum()

    error = pytest.raises(RuntimeError, match="fails") if fails else contextlib.nullcontext()
    with error:
        fsdp_ext.tune(model, x, loss=loss, steps=2, verbose=False)
    assert all(map(torch.equal, shards, (p.to_local() for p in model.parameters())))
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(buffer, torch.ones(WIDTH)) for buffer in buffers)
    assert x.grad is gradient
    assert torch.equal(gradient, torch.ones_like(x))
    assert (
        model._fsdp_ext_unit.root.decision is None
        or not model._fsdp_ext_unit.root.decision.overrides
    )
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_that_change_are_restored(fails: bool) -> None:
    run_ranks(_buffers_change, 1, fails)


def _others_are_restored() -> None:
    dist.destroy_process_group()
    model = make(Simulated(8, LINK))
    model(batch()).sum().backward()
    unit = model[0]._fsdp_ext_unit
    buffers = [buffer.clone() for buffer in model.buffers()]
    fails = mock.patch.object(type(unit.root), "reshard", side_effect=RuntimeError("cannot"))

    def change() -> None:
        with fails, left_as_it_was(model, [unit]):
            for buffer in model.buffers():
                buffer.add_(1)

    with pytest.raises(RuntimeError, match="cannot"):
        change()
    assert buffers
    assert all(map(torch.equal, buffers, model.buffers()))


def test_buffers_are_restored_if_resharding_raises() -> None:
    run_ranks(_others_are_restored, 1)


# - Memory


@contextlib.contextmanager
def recorded_steps(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of the slots' bytes and the number of buckets of each step of a trial."""
    steps: list[tuple[int, int]] = []
    plain = Trial.step

    def step(trial: Trial, *guard: Any) -> float:
        taken = plain(trial, *guard)
        impl = model._fsdp_ext_unit.root.impl
        steps.append((impl.memory()["ring_bytes"], len(impl.buckets())))
        return taken

    with mock.patch.object(Trial, "step", step):
        yield steps


def _within_the_limit() -> None:
    dist.destroy_process_group()
    transport = Simulated(8, Link("slow", alpha=1e-3, beta=1e12))
    model = make(transport, bucket_bytes=0, prefetch=2)
    memory = fsdp_ext.plan(model).memory
    with recorded_steps(model) as steps:
        result = tuned(model, memory_limit=memory.peak)
    # Larger buckets reduce at least as much as single units, so slots may take this much.
    assert max(ring for ring, _ in steps) <= memory.ring + memory.staging + memory.kept_unsharded
    assert all(one.memory <= memory.peak for one in result.measured)
    result = tuned(make(Simulated(8, Link("fast", alpha=1e-9, beta=1e12))))
    assert result.too_large > 0
    assert result.before.buckets > 1
    assert all(one.memory <= 1.25 * result.before.memory for one in result.measured)
    with (
        recorded_steps(model) as steps,
        pytest.raises(ValueError, match=r"memory_limit of at least [\d,]+ bytes, which"),
    ):
        tuned(model, memory_limit=1000)
    # The ring of the first step, which makes the root, is the largest. Steps that measure costs
    # have no larger one.
    assert max(ring for ring, _ in steps) == steps[0][0]


def test_no_step_takes_more_than_the_limit() -> None:
    run_ranks(_within_the_limit, 1)


def _probes_are_of_their_own() -> None:
    dist.destroy_process_group()
    model = make(Simulated(8, LINK), bucket_bytes=10**9)
    with recorded_steps(model) as steps:
        result = tuned(model)
    buckets = [number for _, number in steps[2:]]  # two steps make the root and its buckets
    assert buckets[0] == LAYERS + 1  # each unit is measured by itself
    assert buckets[-1] == result.chosen.buckets < LAYERS
    assert all(unit.forward > 0 < unit.backward for unit in result.costs.compute[1:])


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
    seconds = seconds_of([Iteration(1, spans, 21)])
    assert (seconds["forward", 1], seconds["backward", 1]) == (2, 7)
    assert seconds["forward", 0] == 1  # the loss, from the end of forward to backward


def test_time_on_a_wire_that_both_lanes_share_counts_half() -> None:
    spans = (
        Span("forward", "forward", -1, -1, 0, 1, 5),
        Span("gather", "forward", 1, 1, 100, 1, 3),
        Span("backward", "backward", -1, -1, 0, 6, 20),
        Span("reduce", "backward", 2, 2, 50, 8, 14),
        Span("gather", "backward", 1, 1, 200, 8, 12),
    )
    wire = {("gather", 100): 2, ("gather", 200): 2, ("reduce", 50): 4}
    assert seconds_of([Iteration(1, spans, 21)], one_wire=True).items() >= wire.items()


def test_a_link_is_fitted_to_collectives_of_unlike_sizes_or_scaled_to_those_of_one() -> None:
    typical = (1e-5, 1e10)
    fitted = _fit({("gather", n): 2e-3 + n / 1e9 for n in (10**6, 10**7)}, "gather", typical)
    assert fitted == pytest.approx((2e-3, 1e9))
    taken = 3 * (1e-5 + 10**6 / 1e10)
    scaled = _fit({("gather", 10**6): taken, ("reduce", 10**8): 9.0}, "gather", typical)
    assert scaled == pytest.approx((3e-5, 1e10 / 3))
    assert _fit({}, "gather", typical) == typical  # a single rank gathers nothing


def test_the_best_predictions_of_several_bucket_sizes_race() -> None:
    def one(buckets: int, prefetch: int, memory: int, predicted: float) -> Candidate:
        return Candidate(Choice(1000 // buckets, prefetch), buckets, memory, predicted)

    best, deeper = one(4, 1, 200, 1.0), one(4, 2, 300, 0.998)  # equal within 1%
    other, slow = one(8, 1, 100, 1.2), one(100, 1, 50, 1.5)
    before = Choice(7, 7)  # does not fit
    assert shortlist([slow, other, deeper, best], before) == [best, other, deeper]
    assert shortlist([slow, best], before) == [best, slow]


def test_the_setting_before_races_once() -> None:
    before, same = Choice(300, 1), Choice(250, 1)  # two sizes that give the same buckets
    faster, other = Choice(270, 1), Choice(100, 1)
    found = [
        Candidate(same, 4, 200, 1.0),
        Candidate(before, 4, 200, 1.0),
        Candidate(other, 8, 100, 1.1),
    ]
    assert [one.choice for one in shortlist(found, before)] == [other]
    # With the same number of buckets, another size may put units together differently.
    found.append(Candidate(faster, 4, 200, 0.9))
    assert [one.choice for one in shortlist(found, before)] == [faster, other]


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
    assert "got different (optimizer_states, steps) on the ranks: (0, 2), (1, 2)" in messages[2]


def _runs_out() -> tuple[list[Choice], float]:
    """Rank 1 has no memory for any other setting, and is slower."""
    model = make(bucket_bytes=0)
    before = Choice(0, 1)
    plain = Trial.step

    def step(trial: Trial, *guard: Any) -> float:
        plain(trial, *guard)
        decision = model._fsdp_ext_unit.root.decision
        is_raced = decision is not None and not decision.overrides
        if dist.get_rank() == 1 and is_raced and decision.choice != before:
            raise torch.OutOfMemoryError("out of memory")
        return 1.0 + dist.get_rank()

    with mock.patch.object(Trial, "step", step):
        result = fsdp_ext.tune(model, batch(), steps=2, memory_limit=10**9, verbose=False)
    return [one.choice for one in result.measured], result.chosen.measured


def test_a_setting_that_one_rank_has_no_memory_for_is_dropped_on_all() -> None:
    assert run_ranks(_runs_out, 2) == [([Choice(0, 1)], 2.0)] * 2  # the slowest rank counts


# - Wrong use


class NoFloats(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).argmax(dim=1)


def _errors() -> None:
    model = make()

    def refused(error: type[Exception], match: str, target: Any = model, **options: Any) -> None:
        with pytest.raises(error, match=match):
            fsdp_ext.tune(target, batch(), **options)

    model(batch()).sum().backward()
    refused(ValueError, r"has gradients\. Call optimizer\.zero_grad\(\)")
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    model.set_requires_gradient_sync(True)
    refused(ValueError, r"gradients that are not reduced.*Run a backward with")
    model.reset_iter_state()
    refused(TypeError, "NoFloats that fully_shard was not applied to", NoFloats(model))
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    refused(ValueError, r"hooks behind gradient accumulation.*Call tune before")
    handle.remove()
    stepped = make()
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    refused(ValueError, "hooks behind gradient accumulation", stepped)
    refused(ValueError, r"got a FSDPLayer inside a FSDPSequential, which is", model[0])
    no_floats = fully_shard(NoFloats(make_units()))
    refused(ValueError, r"no floating-point tensor .* Pass loss=", no_floats)
    refused(TypeError, "got a float from loss", loss=lambda y: 1.0)
    refused(ValueError, r"got a tensor of shape \(8, 64\) with req", loss=lambda y: y)
    model(batch()).sum().backward()
    with fsdp_ext.profile(model) as prof:
        model(batch()).sum().backward()
        model.zero_grad()
        refused(ValueError, r"Call it outside of the block of fsdp_ext\.profile")
    assert len(prof.iterations) == 1
    for changed, setter, usual in (
        (model[0], "set_requires_gradient_sync", True),
        (model, "set_reshard_after_backward", True),
        (model, "set_manual_backward_finalization", False),
        (model, "set_is_last_backward", True),
    ):
        getattr(changed, setter)(not usual)
        refused(ValueError, rf"was told otherwise\. Call {setter}\({usual}\) before")
        getattr(changed, setter)(usual)
    for name in ("bucket_bytes", "prefetch"):
        with pytest.raises(ValueError, match=f"{name} is 'auto'.*, or None"):
            make(**{name: "auto"})


def test_wrong_use_raises_and_says_what_to_do() -> None:
    run_ranks(_errors, 1)
