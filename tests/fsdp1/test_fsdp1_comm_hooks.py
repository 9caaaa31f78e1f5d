"""`register_comm_hook`: a function that reduces gradients in place of a collective, as FSDP1's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    FSDP,
    assert_equal,
    make,
    run,
    state,
    torch_fsdp,
    train,
)
from support.launcher import run_ranks
from support.matrix import exhaustive_cases
from support.models import FewRows, Stack
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

NO_SHARD = {"sharding_strategy": ShardingStrategy.NO_SHARD}


def make_both(subject: Any, **options: Any) -> list[Any]:
    return [
        wrap(make(subject), auto_wrap_policy=BY_BLOCK, **options) for wrap in (FSDP, torch_fsdp)
    ]


def half_of_the_sum(group: dist.ProcessGroup, *tensors: Tensor) -> None:
    """A reduction whose result differs from that of backward without a hook."""
    if len(tensors) == 1:
        dist.all_reduce(tensors[0], group=group)
    else:
        dist.reduce_scatter_tensor(tensors[1], tensors[0], group=group)
    tensors[-1].mul_(0.5).add_(0.125)


def compress(state: Any, *tensors: Tensor) -> None:
    """Compress as PyTorch's hooks do, without the parts that need GPUs."""
    for tensor in tensors:
        tensor.data = tensor.data.bfloat16()
    average = (
        default_hooks.allreduce_hook if len(tensors) == 1 else default_hooks.reduce_scatter_hook
    )
    average(state, *tensors)
    tensors[-1].data = tensors[-1].data.float()


def _beside_fsdp1(options: dict[str, Any], transport: str) -> None:
    os.environ["FSDP_EXT_TRANSPORT"] = transport
    group = dist.new_group()
    default = default_hooks.DefaultState(process_group=group)
    average = default_hooks.allreduce_hook if options else default_hooks.reduce_scatter_hook
    for hook, hook_state in ((average, default), (half_of_the_sum, group), (compress, default)):
        results = []
        for model in make_both(FewRows, **options):
            model.register_comm_hook(hook_state, hook)
            results.append(train(model, model))
            model.zero_grad()  # with NO_SHARD, FSDP1's hook also gets what was there before
            with model.no_sync():
                run(model, model, 5).backward()
            run(model, model, 6).backward()
            results[-1] |= {f"accumulated {n}": v for n, v in state(model).items()}
        if transport == "shared_memory" and hook is average:
            model = FSDP(make(FewRows), auto_wrap_policy=BY_BLOCK, **options)
            without = train(model, model)
            assert_equal({name: results[0][name] for name in without}, without)
        assert_equal(*results)


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        ({}, "shared_memory"),
        (NO_SHARD, "process_group"),
        *exhaustive_cases(({}, "process_group"), (NO_SHARD, "shared_memory")),
    ],
)
def test_a_hook_reduces_as_under_fsdp1(options: dict[str, Any], transport: str) -> None:
    run_ranks(_beside_fsdp1, 2, options, transport)


def _tensors(count: int) -> None:
    seen: list[tuple[Tensor, ...]] = []

    def hook(state: str, *tensors: Tensor) -> None:
        assert state == "of the user"
        seen.append(tuple(tensor.clone() for tensor in tensors))
        tensors[-1].zero_()

    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)
    model = FSDP(nn.Linear(8, 6), mixed_precision=precision)
    model.register_comm_hook("of the user", hook)
    model(torch.ones(2, 8)).sum().backward()
    (tensors,) = seen
    assert len(tensors) == count
    assert all(tensor.dtype == BF16 and tensor.ndim == 1 for tensor in tensors)
    assert float(tensors[0].sum()) == 6 * 8 * 2 + 6 * 2, "nothing is divided"
    if count == 2:
        assert tensors[0].numel() == 2 * tensors[1].numel()
    for param in model.parameters():
        assert not bool(param.grad.to_local().any())


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 2)])
def test_a_hook_gets_what_fsdp1_gives(world_size: int, count: int) -> None:
    run_ranks(_tensors, world_size, count)


def nothing(state: object, *tensors: Tensor) -> None:
    pass


def _refused() -> None:
    for model in make_both(Stack):
        with pytest.raises(ValueError, match="hook"):
            model.register_comm_hook(None, 3)
        model.register_comm_hook(None, nothing)
        assert model._comm_hook is nothing
        assert model._comm_hook_state is None
        with pytest.raises(AssertionError):
            model.register_comm_hook(None, nothing)
    for model in make_both(Stack):
        run(model, model, 0)
        with pytest.raises(AssertionError):
            model.blocks[0].register_comm_hook(None, nothing)
    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    run(model, model, 0)
    with pytest.raises(RuntimeError, match=r"after the first forward\. Call it before"):
        model.register_comm_hook(None, nothing)


def test_mistakes_are_those_of_fsdp1() -> None:
    run_ranks(_refused, 2)


def _fails() -> None:
    def fail(state: object, *tensors: Tensor) -> None:
        raise LookupError("no such gradient")

    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    model.register_comm_hook(None, fail)
    for _ in range(2):
        with pytest.raises(LookupError, match="no such gradient"):
            run(model, model, 0).backward()


def test_an_error_of_a_hook_is_raised_at_the_end_of_backward() -> None:
    run_ranks(_fails, 2)
