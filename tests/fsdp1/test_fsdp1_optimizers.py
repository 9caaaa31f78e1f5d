"""Optimizers go on with the parameters that a wrapper shards, summons or loads."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import FSDP, assert_equal, torch_fsdp
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH = 6
CPU = torch.device("cpu")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def wrap(model: nn.Module, **options: Any) -> Any:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
    return loss


def values(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def before_first_step() -> None:
    results, asked = [], []
    for made_before in (False, True):
        model: Any = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if made_before else None
        model = wrap(model, use_orig_params=True)
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        optimizer.zero_grad()  # as after a step that was skipped
        asked.append(sorted(get_state_dict(model, optimizer)[1]["state"]))
        loss_of(model, 1).backward()
        optimizer.step()
        results.append(values(model))
    assert_equal(results[1], results[0])
    assert asked[0] == asked[1] == sorted(values(model))


def test_zero_grad_and_state_dicts_know_the_shards_before_the_first_step() -> None:
    run_ranks(before_first_step, 2)


def searched() -> None:
    def by_hand(model: Any) -> Any:
        for index in (0, 2):
            model[index] = FSDP(model[index], use_orig_params=True, device_id=CPU)
        return FSDP(model, use_orig_params=True, sync_module_states=True)

    for shard in (functools.partial(wrap, use_orig_params=True), by_hand):
        for made_before in (False, True):
            model: Any = make()
            optimizer = torch.optim.SGD(model.parameters()) if made_before else None
            with mock.patch.object(gc, "get_objects", side_effect=gc.get_objects) as search:
                model = shard(model)
            assert search.call_count == made_before * (1 if shard is not by_hand else 2)
            assert optimizer is None or {*optimizer.param_groups[0]["params"]} == {
                *model.parameters()
            }


def test_optimizers_are_searched_only_if_some_may_have_the_original_parameters() -> None:
    run_ranks(searched, 2)


def made_while_summoned() -> None:
    results = []
    for inside in (False, True):
        model = wrap(make())
        if inside:
            with FSDP.summon_full_params(model):
                matrices = [p for p in model.parameters() if p.ndim == 2]
                others = [p for p in model.parameters() if p.ndim < 2]
        else:
            matrices = [p for p in model.parameters() if p.ndim == 2]
            others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "lr": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            model.zero_grad()
        results.append(values(model))
    assert_equal(results[1], results[0])


def test_an_optimizer_of_summoned_parameters_trains_the_shards() -> None:
    run_ranks(made_while_summoned, 2)


def step_while_summoned() -> None:
    model = wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    with (
        FSDP.summon_full_params(model, with_grads=True),
        pytest.raises(RuntimeError, match=r"step was called inside summon_full_params"),
    ):
        optimizer.step()
    before = values(model)
    optimizer.step()
    assert any(not torch.equal(before[name], value) for name, value in values(model).items())


def test_a_step_that_leaving_the_context_would_undo_is_refused() -> None:
    run_ranks(step_while_summoned, 2)


def assigned() -> None:
    results = []
    for assign in (False, True):
        model = wrap(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with FSDP.state_dict_type(model, torch.distributed.fsdp.StateDictType.SHARDED_STATE_DICT):
            for _ in range(2):  # the optimizer has parameters that were replaced twice then
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(saved, assign=assign)
        loss_of(model, 1).backward()
        optimizer.step()
        results.append(values(model))
    assert_equal(results[1], results[0])


def test_an_optimizer_goes_on_with_parameters_that_loading_has_assigned() -> None:
    run_ranks(assigned, 2)


def decayed(model: nn.Module, chosen: Callable[[str, Tensor], bool]) -> torch.optim.Optimizer:
    """Return AdamW that decays the chosen parameters alone, as nanoGPT makes it."""
    named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if chosen(n, p)], "weight_decay": 0.5},
        {"params": [p for n, p in named if not chosen(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def by_shape(name: str, param: Tensor) -> bool:
    return param.dim() >= 2


def nothing(name: str, param: Tensor) -> bool:
    return False


def weight_decay() -> None:
    shapes = {name: param.dim() for name, param in make().named_parameters()}

    def before_wrapping(name: str, param: Tensor) -> bool:
        return shapes[name] >= 2

    def trained(system: Any, chosen: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
        model = system(make(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = decayed(model, chosen)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    for system in (FSDP, torch_fsdp):
        weight = system(make()).module[0].weight
        assert weight.dim() == (2 if system is FSDP else 1)
    # Groups by shapes after wrapping: FSDP1's parameters are 1-D, so none of them decays.
    assert_equal(trained(torch_fsdp, by_shape), trained(torch_fsdp, nothing))
    assert_equal(trained(FSDP, nothing), trained(torch_fsdp, by_shape))
    # Here parameters keep their shapes, so the matrices decay, as without sharding.
    ours = trained(FSDP, by_shape)
    assert not torch.equal(ours["0.weight"], trained(FSDP, nothing)["0.weight"])
    assert_equal(ours, trained(FSDP, before_wrapping))
    # Groups that are chosen before wrapping are the same under both.
    assert_equal(ours, trained(torch_fsdp, before_wrapping))


def test_groups_by_shape_decay_matrices_here_and_nothing_under_fsdp1() -> None:
    run_ranks(weight_decay, 2)


def clears_after_forward(set_to_none: bool, orig: bool) -> None:
    model: Any = FSDP(make(), use_orig_params=orig)  # one unit, which stays whole
    found = []
    for _ in range(2):
        loss = loss_of(model, 0)
        model.zero_grad(set_to_none)
        loss.backward()
        found.append([param.grad.clone() for param in model.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_after_forward_clears_the_shards(
    set_to_none: bool, orig: bool
) -> None:
    run_ranks(clears_after_forward, 2, set_to_none, orig)
