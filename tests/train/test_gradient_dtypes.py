"""Units whose gradients have several dtypes, and parameters with a `grad_dtype` of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.scaled_layers import WIDTH, Scale, average, batch, train, whole
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy

BF16, FP32 = torch.bfloat16, torch.float32
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")
HAS_OVERRIDE = hasattr(Tensor, "_has_grad_dtype_override")


class Block(nn.Module):
    """Trains scales in float32 and a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Scale()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=BF16)
        self.after = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.linear(self.before(x.to(BF16)))))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def shard(fully_shard: Any, *, apart: bool, **options: Any) -> Any:
    model = make()
    for block in model:
        if apart:
            for layer in block.children():
                fully_shard(layer, **options)
        else:
            fully_shard(block, **options)
    return fully_shard(model, **options)


def one_step(model: Any, *, unsharded: bool = False) -> list[Tensor]:
    loss = model(batch(0)).float().square().mean()
    loss.backward()
    if unsharded:
        average(model)
    return [loss.detach(), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]


def expect_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def compare(options: dict[str, Any], policy: MixedPrecisionPolicy) -> None:
    fully_shard = fsdp_ext.fully_shard
    mine = shard(fully_shard, apart=False, mp_policy=policy, **options)
    of_fsdp2 = shard(torch_fsdp.fully_shard, apart=True, mp_policy=policy)
    if policy.reduce_dtype is None:  # the unit accumulates in float32, and units apart do not
        expect_equal(one_step(mine), one_step(of_fsdp2))
        for unit in mine._fsdp_ext_units(recurse=True):
            numel = sum(param.shape.numel() for param in unit.params)
            assert unit.reduction_bytes() == numel * FP32.itemsize
        halves = nn.Linear(WIDTH, WIDTH, dtype=BF16)
        halves.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float16))
        unit = fully_shard(halves)._fsdp_ext_unit
        assert unit.reduction_bytes() == (WIDTH + 1) * WIDTH * FP32.itemsize
        return
    apart = shard(fully_shard, apart=True, mp_policy=policy, **options)
    got = train(mine, unsharded=False)
    assert {tensor.dtype for tensor in got} == {BF16, FP32}
    expect_equal(got, train(apart, unsharded=False))
    expect_equal(got, train(of_fsdp2, unsharded=False))
    with pytest.raises(ValueError, match=r"flat_shard needs .* one dtype"):
        mine[0].flat_shard()
    planned = fsdp_ext.plan(mine)
    units = mine._fsdp_ext_units(recurse=True)
    gradients = sum(unit.impl.share_flat_gradient().nbytes for unit in units)
    assert planned.memory.gradients == gradients > 0


REDUCED_IN_FP32 = MixedPrecisionPolicy(reduce_dtype=FP32)


@pytest.mark.parametrize(
    "setup",
    [
        ({}, REDUCED_IN_FP32, 2),
        ({}, MixedPrecisionPolicy(), 2),
        ({"max_message_bytes": 64}, REDUCED_IN_FP32, 2),
        *exhaustive(
            ({"bucket_bytes": 0}, REDUCED_IN_FP32, 2),
            ({}, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), 2),
            ({}, REDUCED_IN_FP32, 1),
        ),
    ],
    ids=str,
)
def test_a_unit_of_several_dtypes_trains_as_units_of_one_dtype(
    setup: tuple[dict[str, Any], MixedPrecisionPolicy, int],
) -> None:
    options, policy, ranks = setup
    run_ranks(compare, ranks, options, policy)


# - grad_dtype


def low(grad_dtypes: tuple[torch.dtype, torch.dtype]) -> nn.Sequential:
    """Return a model in bfloat16, with these dtypes of the gradients of weights and biases."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, dtype=BF16), nn.Tanh(), nn.Linear(WIDTH, WIDTH, dtype=BF16)
    )
    for layer in (model[0], model[2]):
        layer.weight.grad_dtype, layer.bias.grad_dtype = grad_dtypes
    return model


def train_low(model: Any, micro_batches: int, *, unsharded: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    for step in range(3):
        for number in range(micro_batches):
            if not unsharded:
                model.set_requires_gradient_sync(number + 1 == micro_batches)
            loss = model(batch(10 * step + number).to(BF16)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        if unsharded:
            average(model)
        found += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(p.detach()) for p in model.parameters()]


def with_grad_dtypes(options: dict[str, Any]) -> None:
    # Gradients in bfloat16 are not accumulated here: autograd adds them up in bfloat16, and a unit
    # in the dtype of its reductions.
    for grad_dtypes, micro_batches in (((FP32, FP32), 2), ((FP32, BF16), 1)):
        model: Any = low(grad_dtypes)
        for layer in (model[0], model[2]):
            fsdp_ext.fully_shard(layer, **options)
        fsdp_ext.fully_shard(model)
        got = train_low(model, micro_batches, unsharded=False)
        assert (model[0].weight.grad_dtype, model[0].bias.grad_dtype) == grad_dtypes
        expect_equal(got, train_low(low(grad_dtypes), micro_batches, unsharded=True))


def changes_after_sharding() -> None:
    layer: Any = fsdp_ext.fully_shard(nn.Linear(WIDTH, WIDTH, dtype=BF16))
    layer.set_reduce_scatter_unused_params(True)  # FSDP2 wants a reduce_dtype beside None
    for dtype in (FP32, BF16, None):
        layer.weight.grad_dtype = dtype
        layer(batch(0).to(BF16)).sum().backward()
        assert layer.weight.grad.dtype == layer.weight.grad.to_local().dtype == (dtype or BF16)
        assert layer.bias.grad.dtype == BF16
        layer.zero_grad()
    layer.weight.grad_dtype = FP32
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert layer.weight.grad_dtype == FP32
    layer.weight.grad_dtype = torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"'weight' has grad_dtype=torch.float8_e4m3fn, in which"):
        layer(batch(0).to(BF16))
    other = nn.Linear(WIDTH, WIDTH)
    other.weight.grad_dtype = torch.float8_e4m3fn
    with pytest.raises(ValueError, match="in which gradients cannot be added"):
        fsdp_ext.fully_shard(other)


def half(model: Any) -> None:
    model.half()


def to_the_host(model: Any) -> None:
    model.to("cpu")


def backward_of(model: Any) -> list[Tensor]:
    """Add to the gradients, and return them."""
    dtype = next(model.parameters()).dtype
    model(batch(0).to(dtype)).float().square().mean().backward()
    for grad in (p.grad for p in model.parameters()):
        assert not isinstance(grad, DTensor) or grad.dtype == grad.to_local().dtype
    return [whole(p.grad) for p in model.parameters()]


def survives_conversions() -> None:
    for convert in (half, to_the_host, torch.nn.Module.float):
        model: Any = fsdp_ext.fully_shard(low((FP32, FP32)))
        convert(model)
        assert {p.grad_dtype for p in model.parameters()} == {FP32}
        before = backward_of(model)
        assert {grad.dtype for grad in before} == {FP32}
        if HAS_OVERRIDE:  # before, FSDP2 loses the dtype
            theirs: Any = torch_fsdp.fully_shard(low((FP32, FP32)))
            convert(theirs)
            expect_equal(before, backward_of(theirs))
        convert(model)
        assert [p.grad_dtype for p in model.parameters()] == [FP32] * 4
        expect_equal([whole(p.grad) for p in model.parameters()], before)
        expect_equal(backward_of(model), [2 * grad for grad in before])
        wrapped = fsdp_ext.FullyShardedDataParallel(low((FP32, FP32)), use_orig_params=True)
        convert(wrapped)
        with wrapped.no_sync():
            first = backward_of(wrapped)
        convert(wrapped)
        assert [p.grad_dtype for p in wrapped.parameters()] == [FP32] * 4
        expect_equal([p.grad for p in wrapped.parameters()], first)
        expect_equal(backward_of(wrapped), [2 * grad for grad in before])


def own_dtype_survives_conversions() -> None:
    model: Any = fsdp_ext.fully_shard(low((BF16, BF16)))
    model.float()
    assert {p.grad_dtype for p in model.parameters()} == {BF16}
    assert {grad.dtype for grad in backward_of(model)} == {BF16}
    model.half()
    assert {p.grad_dtype for p in model.parameters()} == {BF16}


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="this torch has no grad_dtype")
def test_a_grad_dtype_and_its_gradients_survive_conversions() -> None:
    run_ranks(survives_conversions, 2)


@pytest.mark.skipif(not HAS_OVERRIDE, reason="before torch 2.15 this is as if it was not set")
def test_a_grad_dtype_that_is_the_parameters_own_survives_conversions() -> None:
    run_ranks(own_dtype_survives_conversions, 2)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="this torch has no grad_dtype")
@pytest.mark.parametrize("options", [{}, *exhaustive({"max_message_bytes": 64})], ids=str)
def test_gradients_have_the_grad_dtype_of_their_parameter(options: dict[str, Any]) -> None:
    run_ranks(with_grad_dtypes, 2, options)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="this torch has no grad_dtype")
def test_a_grad_dtype_may_change_after_sharding() -> None:
    run_ranks(changes_after_sharding, 2)
