"""A wrapped module keeps its class, its own `__setattr__` is called, and it can be converted."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from support.fsdp1_parity import CPU, FSDP, make, run, torch_fsdp
from support.launcher import run_ranks
from support.models import Stack
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor import DTensor

import fsdp_ext
from fsdp_ext.sharding.params.flat_parameter import is_flat


def classes() -> None:
    kinds = [nn.Conv2d, nn.Flatten, nn.Linear]
    for wrap in (FSDP, torch_fsdp):
        for use_orig_params in (True, False):
            options: dict[str, Any] = {"auto_wrap_policy": always_wrap_policy}
            if wrap is FSDP:
                options["use_orig_params"] = use_orig_params
            layers = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3))
            model = wrap(layers, **options)
            model(torch.ones(2, 1, 3, 3)).sum().backward()
            assert [type(layer.module) for layer in model] == kinds
            assert type(model.module) is nn.Sequential
            assert type(model.module[:1]) is nn.Sequential
            assert not isinstance(model.module, FSDPModule)
    assert isinstance(fsdp_ext.fully_shard(nn.Linear(2, 2)), FSDPModule)  # as FSDP2's


def test_wrapped_modules_keep_their_class_as_under_fsdp1() -> None:
    run_ranks(classes, 2)


def converted() -> None:
    """`to` of the wrapper, of a module around it, and of the wrapped module itself."""
    for use_orig_params in (True, False):
        for how in ("wrapper", "around", "wrapped"):
            model = make(Stack)
            wrapped = FSDP(model, use_orig_params=use_orig_params)
            run(wrapped, model, 0).backward()
            wrapped.zero_grad()
            target = {"wrapper": wrapped, "around": nn.Sequential(wrapped), "wrapped": model}[how]
            assert target.to(torch.float64) is target
            wanted = make(Stack).double()
            args, kwargs = model.batch(torch.Generator().manual_seed(0))
            args = tuple(value.double() for value in args)
            output = wrapped(*args, **kwargs)
            torch.testing.assert_close(output, wanted(*args, **kwargs))
            output.sum().backward()
            assert all(p.grad.dtype == torch.float64 for p in wrapped.parameters())


def test_conversions_reach_the_shards_of_wrapped_modules() -> None:
    run_ranks(converted, 2)


def copied() -> None:
    wrapped = FSDP(nn.Linear(2, 2))
    for module in (wrapped, wrapped.module, nn.Sequential(wrapped)):
        with pytest.raises(NotImplementedError, match="does not support deepcopy"):
            copy.deepcopy(module)


def test_wrapped_modules_cannot_be_deep_copied() -> None:
    run_ranks(copied, 1)


class Recorded(nn.Linear):
    """Its own `__setattr__` records what it is given."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and "given" in self.__dict__:
            self.given.append((name, tuple(value.shape), type(value).__name__))
        super().__setattr__(name, value)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.plain = Recorded(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.recorded(x)).square().sum()


def set_by_module() -> None:
    """Swaps call the module's `__setattr__` under all systems, and results are the same."""
    systems: dict[str, Any] = {
        "fully_shard": fsdp_ext.fully_shard,
        "FSDP2": torch_fully_shard,
        "ours": functools.partial(FSDP, use_orig_params=True),
        "ours, flat": functools.partial(FSDP, use_orig_params=False),
        "FSDP1": torch_fsdp,
        "FSDP1, flat": functools.partial(TorchFSDP, device_id=CPU),
    }
    losses, given = {}, {}
    for name, shard in systems.items():
        torch.manual_seed(0)
        model: Any = Pair()
        sharded = shard(model)
        model.recorded.given = []
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for _ in range(3):
            loss = sharded(torch.ones(2, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.detach()
        given[name] = model.recorded.given
        assert {name for name, _, _ in given[name]} == {"weight", "bias"}, name
    assert all(torch.equal(loss, losses["FSDP1"]) for loss in losses.values()), losses
    assert given["fully_shard"] == given["FSDP2"]
    assert given["ours"][:2] == given["FSDP2"][:2]


def test_swaps_call_a_setattr_of_the_modules_own_as_fsdp1_and_fsdp2_do() -> None:
    run_ranks(set_by_module, 2)


def not_set_by_module() -> None:
    os.environ["FSDP_USE_UNSAFE_SETATTR"] = "1"
    for wrap in (FSDP, torch_fsdp):
        model = Recorded(4, 3)
        wrapped = wrap(model)
        model.given = []
        wrapped(torch.ones(2, 4)).sum().backward()
        assert not model.given


def test_swaps_pass_by_setattr_if_the_environment_says_so() -> None:
    run_ranks(not_set_by_module, 1)


class Fails(nn.Linear):
    fails = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.fails and name == "bias":
            raise KeyError("of the user's")
        super().__setattr__(name, value)


def failing() -> None:
    for use_orig_params in (True, False):
        model = Fails(4, 3)
        wrapped = FSDP(model, use_orig_params=use_orig_params)
        names = list(model._parameters)
        for _ in range(2):
            Fails.fails = True
            with pytest.raises(KeyError, match="of the user's"):
                wrapped(torch.ones(2, 4))
            Fails.fails = False
            assert list(model._parameters) == names
            assert all(isinstance(p, DTensor) or is_flat(p) for p in model.parameters())
            wrapped(torch.ones(2, 4)).sum().backward()


def test_training_goes_on_after_a_setattr_has_raised() -> None:
    run_ranks(failing, 2)


def summoned() -> None:
    for wrap in (FSDP, torch_fsdp):
        model = Recorded(4, 3)
        wrapped = wrap(model)
        model.given = []
        with type(wrapped).summon_full_params(wrapped):
            assert ("weight", (3, 4), "Parameter") in model.given
        assert type(wrapped.module) is Recorded


def test_summoned_parameters_are_set_by_the_module_too() -> None:
    run_ranks(summoned, 1)
