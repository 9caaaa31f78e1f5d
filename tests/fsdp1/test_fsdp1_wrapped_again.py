"""A wrapper that is wrapped again trains, clips, saves and loads as FSDP1's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fsdp1_parity import BY_BLOCK, CPU, assert_equal, make, run, state
from support.launcher import run_ranks
from support.models import Stack
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_ext import FullyShardedDataParallel as FSDP

PRECISION = MixedPrecision(torch.bfloat16)


def wrapped_twice(cls: Any, *, use_orig_params: bool) -> Any:
    options = {"device_id": CPU, "use_orig_params": use_orig_params, "mixed_precision": PRECISION}
    inner = cls(make(Stack), auto_wrap_policy=BY_BLOCK, **options)
    return cls(inner, **options)


def trained(cls: Any, *, use_orig_params: bool) -> tuple[Any, dict[str, Tensor | None]]:
    """Return the model, and losses and whole parameters of a few steps, two of them accumulated."""
    model = wrapped_twice(cls, use_orig_params=use_orig_params)
    stack = model.module.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Tensor | None] = {}
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            run(model, stack, 10 + step).backward()
        loss = run(model, stack, step)
        loss.backward()
        assert model.clip_grad_norm_(1e6) > 0  # does not clip: norms are added in other orders
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    with cls.summon_full_params(model):
        for name, param in stack.named_parameters():
            clean = name.replace("_fsdp_wrapped_module.", "")
            found[clean] = param.detach().clone()
    return model, found


def _as_fsdp1(use_orig_params: bool) -> None:
    model, found = trained(FSDP, use_orig_params=use_orig_params)
    theirs, expected = trained(TorchFSDP, use_orig_params=use_orig_params)
    assert_equal(found, expected)
    assert len(FSDP.fsdp_modules(model)) == len(TorchFSDP.fsdp_modules(theirs))
    assert [w._has_params for w in FSDP.fsdp_modules(model)] == [
        w._has_params for w in TorchFSDP.fsdp_modules(theirs)
    ]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert_equal(model.state_dict(), theirs.state_dict())
    assert_equal(model.module.state_dict(), theirs.module.state_dict())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_wrapper_that_is_wrapped_again_trains_as_under_fsdp1(use_orig_params: bool) -> None:
    run_ranks(_as_fsdp1, 2, use_orig_params)


def _resumes(kind: StateDictType, use_orig_params: bool) -> None:
    model, _ = trained(FSDP, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(model, model.module.module, 0).backward()
    optimizer.step()
    with FSDP.state_dict_type(model, kind):
        saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        other = wrapped_twice(FSDP, use_orig_params=use_orig_params)
        result = other.load_state_dict(saved[0])
        assert not result.missing_keys
        assert not result.unexpected_keys
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "stem.weight"'):
            other.load_state_dict({k: v for k, v in saved[0].items() if k != "stem.weight"})
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, saved[1]))
    for each, its in ((model, optimizer), (other, again)):
        its.zero_grad()
        run(each, each.module.module, 1).backward()
        its.step()
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("kind", "use_orig_params"),
    [
        (StateDictType.FULL_STATE_DICT, True),
        (StateDictType.FULL_STATE_DICT, False),
        (StateDictType.SHARDED_STATE_DICT, True),
        (StateDictType.SHARDED_STATE_DICT, False),
    ],
)
def test_a_wrapper_that_is_wrapped_again_saves_and_loads(
    kind: StateDictType, use_orig_params: bool
) -> None:
    run_ranks(_resumes, 2, kind, use_orig_params)


def _local_state() -> None:
    model, _ = trained(FSDP, use_orig_params=False)
    other = wrapped_twice(FSDP, use_orig_params=False)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        saved = model.state_dict()
    assert set(saved) == {"_flat_param", *(f"blocks.{i}._flat_param" for i in range(3))}
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(saved)
    assert_equal(other.state_dict(), model.state_dict())


def test_a_wrapper_that_is_wrapped_again_has_local_state_dicts() -> None:
    run_ranks(_local_state, 2)


def _summoned_without_those_inside() -> None:
    for cls in (FSDP, TorchFSDP):
        model = wrapped_twice(cls, use_orig_params=True)
        weight = make(Stack).stem.weight
        with cls.summon_full_params(model, recurse=False):
            assert not _is_whole(model.module.module.stem.weight, weight)
        with cls.summon_full_params(model.module, recurse=False):
            assert _is_whole(model.module.module.stem.weight, weight)


def _is_whole(param: Tensor, whole: Tensor) -> bool:
    return not isinstance(param, DTensor) and param.shape == whole.shape


def test_the_outer_wrapper_has_no_parameters_to_summon() -> None:
    run_ranks(_summoned_without_those_inside, 2)


def _applied() -> None:
    model = FSDP(FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, use_orig_params=True))
    seen: list[str] = []

    def add_one(module: torch.nn.Module) -> None:
        seen.append(type(module).__name__)
        if hasattr(module, "bias"):
            with torch.no_grad():
                module.bias.add_(1)

    want = make(Stack)
    want.apply(add_one)
    seen.clear()
    model.apply(add_one)
    assert seen.count("FullyShardedDataParallel") == 5
    assert_equal(state(model), state(want))


def test_functions_are_applied_once_to_each_module() -> None:
    run_ranks(_applied, 2)


def _check_every_of_the_outer() -> None:
    with pytest.raises(ValueError, match=r"check_every=2 .* Pass it to the wrapper inside"):
        FSDP(FSDP(make(Stack)), check_every=2)


def test_an_outer_wrapper_refuses_what_only_units_do() -> None:
    run_ranks(_check_every_of_the_outer, 1)
