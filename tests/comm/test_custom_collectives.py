"""`set_custom_all_gather` and `set_custom_reduce_scatter`: objects of the user communicate."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack
from support.parity import Case, Run, compare_on_rank
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

import fsdp_ext
from fsdp_ext import fully_shard


class Allocating:
    """Remembers what it has allocated."""

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []
        self.calls: list[tuple[torch.dtype, bool]] = []

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.allocated.append(torch.empty(size, dtype=dtype, device=device))
        return self.allocated[-1]

    def note(self, *tensors: Tensor) -> None:
        known = {tensor.untyped_storage().data_ptr() for tensor in self.allocated}
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.calls.append((tensors[0].dtype, places <= known))


class Rounding(Allocating, AllGather):
    """Gathers float32 rounded to bfloat16."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor)
        if input_tensor.dtype == torch.float32:
            input_tensor.copy_(input_tensor.bfloat16())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class RoundingSum(Allocating, ReduceScatter):
    """Adds up float32 rounded to bfloat16."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor)
        input_tensor.copy_(input_tensor.bfloat16())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def use(run: Run, **changes: Any) -> None:
    gathers, sums = Rounding(), RoundingSum()
    for module in [*run.model.units(), run.model]:
        module.set_custom_all_gather(gathers)
        module.set_custom_reduce_scatter(sums)
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(**changes)


def over_gloo(run: Run) -> None:
    os.environ["FSDP_EXT_TRANSPORT"] = "process_group"


CASE = Case("custom collectives", Stack, worlds=(2,), after_sharding=use, unsharded=None)
IN_BF16 = dataclasses.replace(
    CASE, fact="in bf16", precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
)
IN_MESSAGES = dataclasses.replace(
    CASE, fact="in messages", after_sharding=partial(use, max_message_bytes=400)
)
OVER_GLOO = dataclasses.replace(CASE, before_sharding=over_gloo)
HYBRID = dataclasses.replace(CASE, mesh=(2, 2), worlds=(4,))
CASES = (CASE, IN_BF16, IN_MESSAGES)


@pytest.mark.parametrize("case", [CASE, IN_BF16, *exhaustive(IN_MESSAGES, OVER_GLOO, HYBRID)])
def test_custom_collectives_train_as_with_fsdp2(case: Case) -> None:
    run_ranks(compare_on_rank, case.worlds[0], case, "fsdp_ext", fresh=case is OVER_GLOO)


def step(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()


class Failing(Rounding):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("of the object")


class FailingSum(RoundingSum):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("of the object")


def _called() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gathers, sums = Rounding(), RoundingSum()
    for layer in model:
        fully_shard(layer)
        layer.set_custom_all_gather(gathers)
    fully_shard(model)
    model[0].set_custom_reduce_scatter(sums)
    for _ in range(3):
        step(model)
    # Weight and bias are two messages, and one sum. Layers are alike, so they share what was
    # allocated.
    assert len(gathers.allocated) == 2
    assert len(sums.allocated) == 2
    assert gathers.calls == [(torch.float32, True)] * 4 * 3
    assert sums.calls == [(torch.float32, True)] * 3
    for wrong in (None, dist.all_gather_into_tensor):
        with pytest.raises(TypeError, match=r"set_custom_all_gather got .* has allocate\(\)"):
            model.set_custom_all_gather(wrong)
        with pytest.raises(TypeError, match=r"set_custom_reduce_scatter got .* has allocate\(\)"):
            model.set_custom_reduce_scatter(wrong)
    model[0].set_custom_reduce_scatter(FailingSum())
    with pytest.raises(KeyError, match="of the object"):
        step(model)
    model[0].set_custom_reduce_scatter(sums)
    model[1].set_custom_all_gather(Failing())
    with pytest.raises(KeyError, match="of the object"):
        step(model)
    model[1].set_custom_all_gather(gathers)
    step(model)


def test_objects_get_tensors_of_their_own_and_their_errors_are_raised() -> None:
    run_ranks(_called, 2)


class FailingOnce(Rounding):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.calls:
            self.calls.append((torch.float32, True))
            raise KeyError("of the object")
        return super().__call__(*args, **kwargs)


def _gathers_again() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    whole = [param.detach().clone().bfloat16().float() for param in layer.parameters()]
    model: Any = fully_shard(layer)
    model.set_custom_all_gather(FailingOnce())
    with pytest.raises(KeyError, match="of the object"):
        model.unshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.unshard()
    for have, want in zip(model.parameters(), whole, strict=True):
        assert torch.equal(have, want)
    model.reshard()


def test_parameters_are_gathered_again_after_an_error_that_was_caught() -> None:
    run_ranks(_gathers_again, 2)


def _fails_before_a_setting() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_custom_all_gather(FailingOnce())
    handle = model.unshard(async_op=True)
    model.set_requires_gradient_sync(True)
    with pytest.raises(KeyError, match="of the object"):
        handle.wait()


def test_an_error_outlives_changes_of_settings() -> None:
    run_ranks(_fails_before_a_setting, 2)


class Waiting(Rounding):
    """Gathers once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_run = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.may_run.wait(60)
        return super().__call__(*args, **kwargs)


def _are_freed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    whole = [param.detach().clone().bfloat16().float() for param in layer.parameters()]
    model: Any = fully_shard(layer)
    gathers = [Waiting() for _ in range(3)]
    freed = [weakref.ref(gather) for gather in gathers]
    while gathers:
        gather = gathers.pop()
        model.set_custom_all_gather(gather)
        handle = model.unshard(async_op=True)
        model.set_custom_all_gather(Rounding())  # the one that is queued stays till it has run
        gather.may_run.set()
        del gather
        handle.wait()
        for have, want in zip(model.parameters(), whole, strict=True):
            assert torch.equal(have, want)
        model.reshard()
    gc.collect()
    assert [ref() for ref in freed] == [None] * 3


def test_objects_that_are_replaced_are_freed_after_their_last_call() -> None:
    run_ranks(_are_freed, 2)


def _in_groups() -> None:
    model: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    model.set_custom_all_gather(Rounding())
    with pytest.raises(NotImplementedError, match="custom_all_gather, which is not supported with"):
        step(model)


def test_a_custom_all_gather_of_smaller_groups_is_refused() -> None:
    run_ranks(_in_groups, 4)
