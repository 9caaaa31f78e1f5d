"""``fsdp_ext.tune``: what it measures, chooses, applies and leaves alone; never how fast it is."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from torch import Tensor, nn

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.auto import Choice
from fsdp_ext.tune import Tuning

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


def make(transport: Any = None, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, transport=transport)
    return fully_shard(model, transport=transport, **options)


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
    root = model._unit.root
    kept = tuple(n for n, unit in enumerate(root.units) if n and not root.reshards(unit))
    assert root.prefetch_depth == root.depth()
    return Choice(root.bucket_bytes(root.units[0]), root.prefetch_depth, kept)


# - On simulated ranks


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
    assert result.chosen.choice.kept == ()  # nobody said how much memory there is
    assert result.considered > 20
    assert result.costs.link == LINK
    assert all(forward > 0 and backward > 0 for forward, backward in result.costs.compute[1:])
    # What runs is what was planned.
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    core = model._unit.root.core
    assert len(core.buckets()) == result.chosen.buckets
    assert core.memory()["ring_slots"] <= result.chosen.choice.prefetch + 1
    text = str(result)
    assert "chosen" in text
    assert "predicted simulated ms" in text
    assert f"{result.considered} settings were considered" in text


def test_what_is_chosen_is_applied_and_nothing_else_changes() -> None:
    run_ranks(_applies, 1)


def _measured_fastest() -> None:
    """A link that is so slow that what it takes is all there is."""
    dist.destroy_process_group()
    model = make(Simulated(8, Link("slow", alpha=5e-3, beta=1e12)), bucket_bytes="auto")
    result = tuned(model)
    fewest = min(one.buckets for one in result.measured)
    assert result.chosen.buckets == fewest < LAYERS
    fastest = min(one.measured or 0.0 for one in result.measured)
    assert (result.chosen.measured or 0.0) <= 1.01 * fastest


def test_where_latency_is_all_few_buckets_are_chosen() -> None:
    run_ranks(_measured_fastest, 1)


def _within_memory() -> None:
    dist.destroy_process_group()
    # Reductions as slow as gathers would hide them.
    slow = Link("slow", alpha=5e-3, beta=1e12, reduce_alpha=1e-6)
    model = make(Simulated(8, slow), bucket_bytes=0, prefetch=1)
    memory = tuned(model).chosen.memory
    model = make(Simulated(8, slow), bucket_bytes=0, prefetch=1)
    plenty = tuned(model, memory_limit=10 * memory)
    assert in_use(model) == plenty.chosen.choice
    assert len(plenty.chosen.choice.kept) > 0  # gathers in backward would show
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
    assert chosen != default
    second = make(transport, **auto)
    second(batch())
    assert in_use(second) == chosen
    assert in_use(make_and_run(transport.link)) == default  # that did not ask for it
    next(first.parameters()).requires_grad_(False)
    first(batch())  # made anew, it stays as chosen
    assert in_use(first) == chosen


def test_a_model_that_looks_the_same_begins_with_what_was_chosen() -> None:
    run_ranks(_auto, 1)


# - On real ranks


def _on_ranks() -> tuple[Choice, list[Tensor], str]:
    model = make()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = fsdp_ext.tune(model, batch(), steps=2, loss=lambda y: y.square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        in_use(model),
        [p.full_tensor() for p in model.parameters()],
        out.getvalue() + str(result),
    )


def _without() -> list[Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def test_ranks_choose_the_same_and_train_as_without() -> None:
    (choice, parameters, printed), (other, _, silent) = run_ranks(_on_ranks, 2)
    assert choice == other
    assert printed.count("settings were considered") == 2  # once by itself
    assert silent.count("settings were considered") == 1
    for got, want in zip(parameters, run_ranks(_without, 2)[0], strict=True):
        assert torch.equal(got, want)


# - Wrong use


class NoFloats(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).argmax(dim=1)


def _errors() -> None:
    with pytest.raises(TypeError, match="tune expects a module that fully_shard was applied to"):
        fsdp_ext.tune(nn.Linear(WIDTH, WIDTH), batch())
    model = make()
    with pytest.raises(ValueError, match="at least 2 steps for each measurement but got 1"):
        fsdp_ext.tune(model, batch(), steps=1)
    model(batch()).sum().backward()
    with pytest.raises(ValueError, match=r"without gradients.*call optimizer.zero_grad\(\)"):
        fsdp_ext.tune(model, batch())
    model.zero_grad()
    with pytest.raises(TypeError, match=r"that fully_shard was applied to but got NoFloats"):
        fsdp_ext.tune(NoFloats(model), batch())
    with pytest.raises(ValueError, match=r"got a FSDPLayer inside a FSDPSequential that is"):
        fsdp_ext.tune(model[0], batch())
    with pytest.raises(ValueError, match="none; pass loss="):
        fsdp_ext.tune(fully_shard(NoFloats(make_units())), batch())
    for limit in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"memory_limit to be a positive .* got {limit}"):
            fsdp_ext.tune(model, batch(), memory_limit=limit)
    with pytest.raises(ValueError, match=r"optimizer_states to be a number .* but got -1"):
        fsdp_ext.tune(model, batch(), optimizer_states=-1)
    with pytest.raises(TypeError, match=r"loss to be a function .* but got 'mean'"):
        fsdp_ext.tune(model, batch(), loss="mean")
    with pytest.raises(TypeError, match="loss to return a tensor but got float"):
        fsdp_ext.tune(model, batch(), loss=lambda y: 1.0)
    with pytest.raises(ValueError, match=r"a scalar .* got one of shape \(8, 64\) with req"):
        fsdp_ext.tune(model, batch(), loss=lambda y: y)
    model[0].set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match=r"call set_requires_gradient_sync\(True\) before"):
        fsdp_ext.tune(model, batch())
    model[0].set_requires_gradient_sync(True)
    model.set_is_last_backward(False)
    with pytest.raises(ValueError, match=r"call set_is_last_backward\(True\) before"):
        fsdp_ext.tune(model, batch())
    for name in ("bucket_bytes", "prefetch"):
        with pytest.raises(ValueError, match=f"{name} expects .*'auto' or None but got 'large'"):
            make(**{name: "large"})


def test_wrong_use_is_told_in_one_sentence() -> None:
    run_ranks(_errors, 1)
