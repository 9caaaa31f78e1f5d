"""Graphs may outlive their model, and parameters may be frozen and unfrozen while graphs wait."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import FullyShardedDataParallel, fully_shard

SYSTEMS = {"fsdp_ext": fully_shard, "fsdp2": torchs_fully_shard}


def make_model(shard: Any = fully_shard, **settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2]):
        shard(layer, **settings)
    shard(model, **settings)
    return model


def run_without_model(shard: Any, **settings: Any) -> list[Tensor]:
    """Return the gradients of the input and of the parameters; backward has no model any more."""
    model = make_model(shard, **settings)
    parameters = list(model.parameters())
    x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
    loss = model(x).square().sum()
    del model
    gc.collect()
    _others = [torch.full((size,), 7e3) for size in range(16, 20_000, 16)]  # in memory that is free
    loss.backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad.to_local() for parameter in parameters)]


def _dropped() -> None:
    for settings in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
        ours, theirs = (run_without_model(shard, **settings) for shard in SYSTEMS.values())
        for gradient, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(gradient, expected)


def test_backward_needs_no_model() -> None:
    run_ranks(_dropped, 2)


def _dropped_wrapper() -> None:
    gradients = {}
    for use_orig_params in (False, True):
        wrapper = FullyShardedDataParallel(nn.Linear(6, 8), use_orig_params=use_orig_params)
        parameters = list(wrapper.parameters())
        loss = wrapper(torch.ones(4, 6)).sum()
        del wrapper
        gc.collect()
        loss.backward()
        gradients[use_orig_params] = sum(parameter.grad.sum() for parameter in parameters)
    assert gradients[False] != 0
    assert gradients[True].full_tensor() != 0


def test_backward_needs_no_wrapper() -> None:
    run_ranks(_dropped_wrapper, 2)


def _released() -> None:
    model = make_model()
    parameter = weakref.ref(model[0].weight)
    loss = model(torch.ones(4, 6)).sum()
    loss.backward()
    del model
    gc.collect()
    assert parameter() is None
    assert loss.grad_fn is not None


def _set_attribute(parameter: Any, reference: Any) -> None:
    parameter.model = reference


def _register_hook(parameter: Any, reference: Any) -> None:
    parameter.register_hook(lambda gradient: None if reference is None else gradient)


def _referred_to() -> None:
    for refers in (weakref.ref, lambda model: model):
        for put, is_whole in itertools.product((_set_attribute, _register_hook), (False, True)):
            model: Any = make_model()
            if is_whole:
                model[0].unshard()
            for parameter in model[0].parameters():
                put(parameter, refers(model))
            model(torch.ones(4, 6)).sum().backward()
            known = weakref.ref(model)
            del model, parameter
            gc.collect()
            assert (known() is None) is (refers is weakref.ref), (put, is_whole)


def test_attributes_and_hooks_of_a_parameter_may_refer_to_its_model_weakly() -> None:
    run_ranks(_referred_to, 2, fresh=True)


def test_after_backward_a_graph_keeps_nothing() -> None:
    run_ranks(_released, 2)


def gradients_after_unfreezing(model: nn.Sequential) -> list[list[bool]]:
    """Freeze a layer, run forward, and unfreeze it while it may be unsharded; train some steps."""
    model[0].requires_grad_(False)
    model(torch.ones(4, 6))
    model[0].requires_grad_(True)
    found = []
    for _step in range(3):
        model.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        found.append([parameter.grad is not None for parameter in model.parameters()])
    return found


def _unfrozen() -> None:
    for reshard in (False, True):
        model = make_model(reshard_after_forward=reshard)
        assert gradients_after_unfreezing(model) == [[True] * 4] * 3
        assert all(parameter.requires_grad for parameter in model.parameters())


def _frozen_before_resharding() -> None:
    for ran, reshards in itertools.product((False, True), (False, True)):
        model = make_model()
        if ran:
            model(torch.ones(4, 6)).sum().backward()
            model.zero_grad()
        model[0].unshard()
        model[0].bias.requires_grad_(False)
        if reshards:
            model.state_dict()
        model(torch.ones(4, 6)).square().mean().backward()
        found = [parameter.grad is not None for parameter in model.parameters()]
        assert found == [True, False, True, True]


@pytest.mark.parametrize("work", [_unfrozen, _frozen_before_resharding])
def test_requires_grad_of_unsharded_parameters_counts(work: Callable[[], None]) -> None:
    run_ranks(work, 2)


def _frozen_between() -> None:
    model = make_model()
    first = model(torch.ones(4, 6)).sum()
    model[0].requires_grad_(False)
    second = model(torch.ones(4, 6)).sum()
    with pytest.raises(RuntimeError, match="Run that backward first"):
        first.backward()
    second.backward()
    assert [parameter.grad is not None for parameter in model.parameters()] == [False] * 2 + [
        True
    ] * 2


def test_a_backward_from_before_freezing_is_refused() -> None:
    run_ranks(_frozen_between, 2)


def _uses_sharded_parameters_beside_a_kept_graph() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    model(torch.ones(4, 6)).sum().backward()
    _kept = model(torch.ones(4, 6)).sum()  # of units that are replaced now
    model[0].requires_grad_(True)
    loss = model(torch.ones(4, 6)).sum()
    weight: Any = model[2].weight
    weight.grad = None
    weight.square().sum().backward()
    assert torch.equal(weight.grad.to_local(), 2 * weight.to_local())
    loss.backward()


def test_sharded_parameters_may_be_used_beside_a_graph_of_replaced_units() -> None:
    run_ranks(_uses_sharded_parameters_beside_a_kept_graph, 1)


def _frozen_in_turn() -> None:
    """Freeze the halves of a model in turn, as a GAN with one root does."""
    ours, theirs = make_model(bucket_bytes=0), make_model(torchs_fully_shard)
    root: Any = ours
    x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
    impls, reduced = [], []
    for step in range(12):
        for model in (ours, theirs):
            model.zero_grad()
            for half in (0, 2):
                model[half].requires_grad_(half == step % 2 * 2)
            for _micro_batch in range(1 + step % 3):
                model(x).square().mean().backward()
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            gradient, expected = param.grad, other.grad
            assert (gradient is None) == (expected is None) == (not param.requires_grad)
            if gradient is not None and expected is not None:
                assert torch.equal(gradient.to_local(), expected.to_local())
        impls.append(root._fsdp_ext_unit.root.impl)
        reduced.append(impls[-1].counters()["reduce_scatters"])
    assert impls[0] is not impls[1] is not impls[2]
    assert all(impl is impls[2] for impl in impls[2:])
    assert reduced[-1] - reduced[2] == sum(1 + step % 3 for step in range(3, 12))


def test_freezing_again_and_again_recreates_no_units() -> None:
    run_ranks(_frozen_in_turn, 2)


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be turned off, as peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6, bias=False)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.adapter(x) if self.is_on else 0)

    def turn(self, is_on: bool) -> None:
        self.is_on = is_on
        self.adapter.requires_grad_(is_on)


def _train_beside_the_model_without_adapter(shard: Any, **settings: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    for layer in model:
        shard(layer, **settings)
    shard(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.linspace(step, 1, 24).view(4, 6)
        y = model(x)
        model[0].turn(False)
        model[2].turn(False)
        with torch.no_grad():
            references = [model(x), model(-x)]
        model[0].turn(True)
        model[2].turn(True)
        loss = (y - references[0] - references[1] - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


class Hidden(nn.Linear):
    """Hides its output from the unit, which then stays unsharded until backward."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(output=super().forward(x))


class FirstAndLast(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(getattr(y, "output", y))
        return result


def _freezing_changes_nothing_for_units_that_stay_unsharded() -> None:
    def gradients(kind: str, *, freezes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        kinds = {"embedding": nn.Embedding(9, 6), "hidden": Hidden(6, 6)}
        model = FirstAndLast(kinds.get(kind, nn.Linear(6, 6)))
        first: Any = model.first
        fully_shard(first, bucket_bytes=0, reshard_after_forward=kind != "held")
        fully_shard(model)
        if kind == "embedding":
            first.set_unshard_in_backward(False)
        if kind == "held":
            first.unshard()
        x = torch.arange(4) if kind == "embedding" else torch.linspace(0, 1, 24).view(4, 6)
        losses = [model(x).square().sum(), model(x).sum(), model(x).sum()]
        for loss in losses:
            model.set_requires_gradient_sync(loss is not losses[0])
            first.requires_grad_(not freezes)
            with torch.no_grad():
                model(x)
            first.requires_grad_(True)
            loss.backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    warnings.filterwarnings("ignore", "unit .* returned a SimpleNamespace")
    for kind in ("embedding", "hidden", "held", "plain"):
        found, expected = (gradients(kind, freezes=freezes) for freezes in (True, False))
        assert all(map(torch.equal, found, expected)), kind


def _unfreezing_for_an_evaluation_leaves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    fully_shard(model)
    for step in range(3):
        loss = model(torch.ones(2, 4)).sum()
        model[1].requires_grad_(True)  # of the root, which is unsharded after forward
        with torch.no_grad():
            model(torch.ones(2, 4))
        model[1].requires_grad_(False)
        if step < 2:
            loss.backward()
    model.unshard()
    assert [param.requires_grad for param in model.parameters()] == [True, True, False, False]
    model.reshard()
    model(torch.ones(2, 4)).sum().backward()
    model.unshard()
    model[1].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def _frozen_under_a_checkpoint_of_the_model() -> None:
    model = make_model()
    x = torch.ones(4, 6, requires_grad=True)
    for step in range(4):
        model[0].requires_grad_(step % 2 == 0)
        checkpoint(model, x, use_reentrant=True).sum().backward()
        found = [param.grad is not None for param in model.parameters()]
        assert found == [step % 2 == 0] * 2 + [True] * 2, step
        model.zero_grad()


def _refused_evaluations() -> None:
    """Raise for flat parameters, and in the second backward of one graph."""
    flat = FullyShardedDataParallel(nn.Linear(6, 3), use_orig_params=False)
    model = make_model()
    for each, graph_is_kept in ((flat, False), (model, True)):
        loss = each(torch.ones(4, 6)).sum()
        if graph_is_kept:
            loss.backward(retain_graph=True)
        for is_trained in (False, True):
            for param in each.parameters():
                param.requires_grad_(is_trained)
            if not is_trained:
                with torch.no_grad():
                    each(torch.ones(4, 6))
        with pytest.raises(RuntimeError, match="Run that backward first"):
            loss.backward()


def _frozen_for_an_evaluation() -> None:
    for settings in ({}, {"reshard_after_forward": False}):
        expected = _train_beside_the_model_without_adapter(torchs_fully_shard, **settings)
        found = _train_beside_the_model_without_adapter(fully_shard, **settings)
        assert torch.equal(torch.stack(found), torch.stack(expected))
    _freezing_changes_nothing_for_units_that_stay_unsharded()
    _unfreezing_for_an_evaluation_leaves_nothing()
    _frozen_under_a_checkpoint_of_the_model()
    _refused_evaluations()
    model = make_model()
    loss = model(torch.ones(4, 6)).sum()
    model[0].requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="Set requires_grad back before that backward"):
        loss.backward()
    model(torch.ones(4, 6)).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [False] * 2 + [True] * 2


def test_parameters_may_be_frozen_for_an_evaluation_before_backward() -> None:
    run_ranks(_frozen_for_an_evaluation, 2)


def _sharded_later() -> None:
    model = make_model()
    model(torch.ones(4, 6)).sum().backward()
    model.append(fully_shard(nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match=r"'3\.weight' is of a sharded module that was added"):
        model(torch.ones(4, 6))


def test_a_sharded_module_added_after_the_first_forward_is_refused() -> None:
    run_ranks(_sharded_later, 2)


def _fake() -> None:
    model = make_model()
    model(torch.ones(4, 6)).sum().backward()
    for parameter in model.parameters():
        assert parameter.storage_offset() == 0  # of the DTensor; its shard may lie anywhere
        for tensor in (parameter, parameter.grad):
            FakeTensorMode().from_tensor(tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.full_tensor()
    torch.compile(lambda: optimizer.step(), backend="eager")()
    expected = before - 0.1 * model[0].weight.grad.full_tensor()
    torch.testing.assert_close(model[0].weight.full_tensor(), expected)


def test_an_optimizer_step_compiles_on_every_rank() -> None:
    run_ranks(_fake, 2)


def test_full_precision_in_evaluation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    precision = fsdp_ext.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="FSDP_USE_FULL_PREC_IN_EVAL is 1"):
        FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=precision)


def _collected_in_a_hook() -> None:
    """Let a hook on a lane's thread make objects while a model that shares the lane is garbage."""
    collected = []

    def make_objects(gradients: Tensor) -> None:
        collected.append(gc.get_count())
        _ = [[number] for number in range(1000)]

    model, other = make_model(), make_model()
    model[0].set_all_reduce_hook(make_objects)
    for each in (model, other):
        each(torch.ones(4, 6)).square().sum().backward()
    before = gc.get_threshold()
    gc.disable()
    loss = model(torch.ones(4, 6)).square().sum()
    cycle = [other]
    cycle.append(cycle)  # type: ignore[arg-type]
    del other, each, cycle
    gc.set_threshold(1, 1, 1)
    gc.enable()
    loss.backward()
    gc.set_threshold(*before)
    assert collected


def test_a_hook_frees_no_model_on_the_thread_of_a_lane() -> None:
    run_ranks(_collected_in_a_hook, 1)
