"""The methods of `FullyShardedDataParallel` do what FSDP1's do."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    FSDP,
    Values,
    assert_equal,
    average_gradients,
    make,
    run,
    state,
    torch_fsdp,
    whole,
)
from support.launcher import run_ranks
from support.models import DIM, Stack, Subject, Transformer
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import (
    always_wrap_policy,
)
from torch.distributed.tensor import DTensor


def fails_after_backward(wrapped: FSDP) -> None:
    def fail_in_no_sync() -> None:
        with wrapped.no_sync():
            run(wrapped, wrapped, 0).backward()
            assert all(type(p.grad) is Tensor for p in wrapped.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_no_sync()


def accumulated() -> None:
    def train_accumulating(wrapped: Any, model: Subject) -> Values:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        for step in range(0, 6, 3):
            with wrapped.no_sync():
                run(wrapped, model, step).backward()
                with wrapped.no_sync():
                    run(wrapped, model, step + 1).backward()
            run(wrapped, model, step + 2).backward()
            optimizer.step()
            if step == 0:
                optimizer.zero_grad()
        return state(wrapped)

    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    got = train_accumulating(wrapped, model)
    model = make(Stack)
    reference = torch_fsdp(model, auto_wrap_policy=BY_BLOCK)
    assert_equal(got, train_accumulating(reference, model))

    wrapped.zero_grad()
    fails_after_backward(wrapped)
    run(wrapped, wrapped, 1).backward()
    assert all(p.grad is not None for p in wrapped.parameters())
    with pytest.raises(RuntimeError, match=r"no_sync was called .* inside another one"):
        wrapped.blocks[0].no_sync().__enter__()


def test_no_sync_accumulates_as_fsdp1() -> None:
    run_ranks(accumulated, 2)


def norms_before_clipping(norm_type: float) -> list[float]:
    norms = []
    for max_norm in (0.05, 1e6):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
        run(wrapped, model, 0).backward()
        got = wrapped.clip_grad_norm_(max_norm, norm_type)
        assert type(got) is Tensor
        assert got.shape == ()
        model = make(models.FewRows)
        reference = torch_fsdp(model, auto_wrap_policy=BY_BLOCK)
        run(reference, model, 0).backward()
        want = reference.clip_grad_norm_(max_norm, norm_type)
        # Both sum up, each in its own order.
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        clipped = state(wrapped)
        for name, value in state(reference).items():
            torch.testing.assert_close(clipped[name], value, rtol=2e-6, atol=0)
        model = make(models.FewRows)
        run(model, model, 0).backward()
        average_gradients(model)
        plain = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        torch.testing.assert_close(got, plain, rtol=1e-6, atol=0)
        norms.append(float(got))
    return norms


def norm_of_local_gradients() -> None:
    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    run(wrapped, model, 0).backward()
    grads: list[Any] = [param.grad for param in wrapped.parameters()]
    total = torch.stack([grad.norm() for grad in grads]).square().sum()
    with pytest.raises(NotImplementedError):
        dist.all_reduce(total)
    total = torch.stack([grad.to_local().norm() for grad in grads]).square().sum()
    dist.all_reduce(total)
    torch.testing.assert_close(total.sqrt(), wrapped.clip_grad_norm_(1e6), rtol=1e-6, atol=0)


def test_ranks_that_reduce_norms_of_gradients_themselves_need_the_local_ones() -> None:
    run_ranks(norm_of_local_gradients, 2)


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
def test_clip_grad_norm_is_that_of_fsdp1(norm_type: float) -> None:
    first, second = run_ranks(norms_before_clipping, 2, norm_type)
    assert first == second
    assert first[0] > 0.05


def clip_corners() -> None:
    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, ignored_modules=[model.head])
    assert float(wrapped.clip_grad_norm_(1.0)) == 0  # before any gradient
    run(wrapped, model, 0).backward()
    for param in model.head.parameters():  # a gradient that fsdp_ext reduces
        dist.all_reduce(param.grad)
        param.grad /= 2
    with torch.no_grad():
        run(wrapped, model, 1)  # leaves the root unsharded
    got = wrapped.clip_grad_norm_(0.05)
    plain = make(Stack)
    run(plain, plain, 0).backward()
    average_gradients(plain)
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ was called .* inside another one"):
        wrapped.blocks[0].clip_grad_norm_(1.0)

    for wrap in (FSDP, torch_fsdp):  # the greatest gradient is an ignored one of rank 1
        model = make(Stack)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK, ignored_modules=[model.head])
        (wrapped(torch.ones(2, DIM)) * (1 + 9 * dist.get_rank())).sum().backward()
        local = max(float(param.grad.abs().max()) for param in model.head.parameters())
        norm = wrapped.clip_grad_norm_(1.0, math.inf)
        dist.all_reduce(greatest := torch.tensor(local), dist.ReduceOp.MAX)
        assert torch.equal(norm, greatest)

    double = FSDP(make(Stack).double())
    double(torch.ones(2, DIM).double()).sum().backward()
    assert double.clip_grad_norm_(1.0).dtype == torch.float64
    half = FSDP(make(Stack).bfloat16())
    half(torch.ones(2, DIM).bfloat16()).sum().backward()
    assert half.clip_grad_norm_(1.0).dtype == BF16


def test_clip_grad_norm_with_ignored_parameters_and_other_dtypes() -> None:
    run_ranks(clip_corners, 2)


def passed_through() -> None:
    layers = FSDP(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), auto_wrap_policy=always_wrap_policy)
    assert isinstance(layers[0], FSDP)
    assert layers[0].in_features == 2
    assert [type(layer.module).__name__ for layer in layers] == ["Linear", "ReLU"]
    assert isinstance(layers.module, nn.Sequential)
    assert isinstance(layers[0].module, nn.Linear)
    assert not hasattr(layers, "missing")
    with pytest.raises(AttributeError, match="'missing'"):
        layers.missing  # noqa: B018
    layers.eval()
    assert not layers[0].module.training
    with pytest.raises(NotImplementedError, match="does not support deepcopy"):
        copy.deepcopy(layers)
    around = nn.Sequential(layers, FSDP(nn.Linear(3, 1)))
    assert FSDP.fsdp_modules(around) == [layers, layers[0], layers[1], around[1]]
    assert FSDP.fsdp_modules(around, root_only=True) == [layers, around[1]]
    assert layers.check_is_root()
    assert not layers[0].check_is_root()
    around(torch.ones(1, 2)).backward()


def test_attributes_and_items_are_those_of_the_module() -> None:
    run_ranks(passed_through, 1)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert not isinstance(module.weight, DTensor)
        with torch.no_grad():
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / 100)


def applied() -> None:
    def fail(module: nn.Module) -> None:
        raise KeyError

    for forwards in (0, 1):  # before the first forward, and with units still unsharded
        wrapped = FSDP(make(Transformer), auto_wrap_policy=BY_BLOCK)
        params = dict(wrapped.named_parameters())
        plain = make(Transformer).apply(fill)
        for _ in range(forwards):
            run(wrapped, wrapped, 0)
        assert wrapped.apply(fill) is wrapped
        assert dict(wrapped.named_parameters()) == params
        assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, plain.state_dict())
        assert torch.equal(run(wrapped, wrapped, 0), run(plain, plain, 0))
        with pytest.raises(KeyError):
            wrapped.apply(fail)
        assert dict(wrapped.named_parameters()).keys() == params.keys()
        assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, plain.state_dict())


def test_apply_sees_whole_parameters() -> None:
    run_ranks(applied, 2)
