"""`get_pending_gradients` shows what waits for a reduction, and `synchronize_gradients` reduces it.

PyTorch's sources have these methods after 2.15, and no release has them yet. So what is shown is
compared with the unsharded model's gradients of this rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import tolerance
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_ext

WIDTH = 6
BF16 = torch.bfloat16


def make() -> nn.Sequential:
    torch.manual_seed(0)
    # 5 rows are shared unevenly, and one bias has fewer elements than there are ranks.
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1))


def batch(number: int) -> Tensor:
    torch.manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, WIDTH)


def backward(model: Any, number: int) -> None:
    model(batch(number)).square().sum().backward()


def expect_equal(got: Any, expected: Tensor) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    relative, absolute = tolerance(dist.get_world_size())
    torch.testing.assert_close(got, expected, rtol=relative, atol=absolute)


def average(tensor: Tensor) -> Tensor:
    tensor = tensor / dist.get_world_size()
    dist.all_reduce(tensor)
    return tensor


def sharded(options: dict[str, Any], together: bool) -> Any:
    model = make()
    if together:
        fsdp_ext.fully_shard([model[0], model[2]], **options)
    else:
        fsdp_ext.fully_shard(model[0], **options)
    return fsdp_ext.fully_shard(model, **options)


def shows_and_reduces(options: dict[str, Any], together: bool) -> None:
    """Reduce one micro-batch, accumulate two, change what they left, and reduce that."""
    model, plain = sharded(options, together), make()
    params = list(model.parameters())
    assert model.get_pending_gradients() == {}
    model.synchronize_gradients()  # nothing has run
    backward(model, 0)
    assert model.get_pending_gradients() == {}
    backward(plain, 0)
    reduced = [average(p.grad) for p in plain.parameters()]
    plain.zero_grad()
    model.set_requires_gradient_sync(False)
    for number in (1, 2):
        backward(model, number)
        backward(plain, number)
        pending = model.get_pending_gradients()
        assert set(pending) == set(params)
        for param, whole in zip(params, plain.parameters(), strict=True):
            gradient, partial_sum = pending[param]
            assert partial_sum is None
            expect_equal(gradient, whole.grad)
            assert model.get_pending_gradients()[param][0] is gradient
        # What is put into the dict has no effect, and what is written into a gradient has one. The
        # last one is written after the next forward, before its backward.
        pending.clear()
        later = model(batch(3)) if number == 2 else None
        for grads in (
            model.get_pending_gradients().values(),
            [(p.grad,) for p in plain.parameters()],
        ):
            for gradient, *_ in grads:
                gradient.square_()
                gradient[:1].add_(1)
    later.square().sum().backward()
    backward(plain, 3)
    for param, before in zip(params, reduced, strict=True):
        expect_equal(param.grad, before)
    assert set(model[0].get_pending_gradients(recurse=False)) == set(
        [*model[0].parameters(), *model[2].parameters()] if together else model[0].parameters()
    )
    model[0].synchronize_gradients(recurse=False)
    assert not set(model[0].parameters()) & set(model.get_pending_gradients())
    assert set(model[3].parameters()) <= set(model.get_pending_gradients())
    model.synchronize_gradients()
    model.synchronize_gradients()  # nothing is left
    assert model.get_pending_gradients() == {}
    for param, before, whole in zip(params, reduced, plain.parameters(), strict=True):
        expect_equal(param.grad, before + average(whole.grad))
    backward(model, 4)  # the setting still holds
    assert set(model.get_pending_gradients()) == set(params)


CASES: list[dict[str, Any]] = [
    {"bucket_bytes": 0},
    {"max_message_bytes": 96, "reshard_after_forward": False},
]


@pytest.mark.parametrize("ranks", [2, *exhaustive(1, 4)])
def test_accumulated_gradients_are_shown_changed_and_reduced(ranks: int) -> None:
    run_ranks(_shows_in_all_cases, ranks)


def _shows_in_all_cases() -> None:
    for options in CASES:
        for together in (False, True):
            shows_and_reduces(options, together)
    _in_the_dtype_of_the_reduction()
    _by_dimension_1()
    _of_used_parameters()
    _after_a_change_of_the_factor_and_of_the_parameters()
    _changed_before_a_conversion()
    _not_in_backward()


def _in_the_dtype_of_the_reduction() -> None:
    for policy, dtype in (
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16), BF16),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32), torch.float32),
    ):
        model: Any = fsdp_ext.fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy)
        for value, sync in ((3, True), (256, False), (1, False), (-256, False)):
            model.set_requires_gradient_sync(sync)
            model(torch.full((1, 1), float(value))).sum().backward()
        gradient, _ = model.get_pending_gradients()[model.weight]
        rest = 1.0 if dtype == torch.float32 else 0.0  # 257 is 256 in bf16
        assert gradient.dtype == dtype
        expect_equal(gradient, torch.full((2, 1), rest, dtype=dtype))
        model.synchronize_gradients()
        expect_equal(model.weight.grad, torch.full((2, 1), 3 + rest))


def _by_dimension_1() -> None:
    width = 2 * dist.get_world_size()
    model: Any = nn.Linear(width, 3, bias=False)
    fsdp_ext.fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    model.set_requires_gradient_sync(False)
    model(torch.arange(width).float()).sum().backward()
    gradient, _ = model.get_pending_gradients()[model.weight]
    expect_equal(gradient, torch.arange(width).float().expand(3, width))
    gradient[1, 1] = 7
    model.synchronize_gradients()
    expect_equal(model.weight.grad, gradient)


def _of_used_parameters() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = model[0].forward
    model[0].bias.requires_grad_(False)
    fsdp_ext.fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert set(model.get_pending_gradients()) == {model[0].weight}


def _after_a_change_of_the_factor_and_of_the_parameters() -> None:
    model: Any = fsdp_ext.fully_shard(nn.Linear(1, 2))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 3.0)).sum().backward()
    model.get_pending_gradients()[model.weight][0].add_(1)
    model.set_gradient_divide_factor(0.5)
    model.bias.requires_grad_(False)
    model(torch.full((1, 1), 2.0)).sum().backward()
    assert set(model.get_pending_gradients()) == {model.weight, model.bias}
    model.get_pending_gradients()[model.weight][0].mul_(2)
    model.to(torch.float64)
    model.synchronize_gradients()
    ranks = dist.get_world_size()
    expect_equal(model.weight.grad, torch.full((2, 1), 2.0 * ranks * 12, dtype=torch.float64))


def _changed_before_a_conversion() -> None:
    """The backward after it adds to what was changed."""
    model: Any = fsdp_ext.fully_shard(nn.Linear(1, 2))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 3.0)).sum().backward()
    model.get_pending_gradients()[model.weight][0].mul_(2)
    model.to(torch.float64)
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 1), 2.0, dtype=torch.float64)).sum().backward()
    expect_equal(model.weight.grad, torch.full((2, 1), 8.0, dtype=torch.float64))


def _not_in_backward() -> None:
    model: Any = fsdp_ext.fully_shard(nn.Linear(1, 2))
    for call in (model.get_pending_gradients, model.synchronize_gradients):
        inputs = torch.ones(1, 1, requires_grad=True)
        inputs.register_hook(lambda _, call=call: call() and None)
        with pytest.raises(RuntimeError, match=r"while (forward or )?backward runs. (Call|Reduce)"):
            model(inputs).sum().backward()


def _with_replicas_and_tensor_parallelism() -> None:
    reference = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    for model, options in (
        (nn.Linear(4, 4, bias=False), {"mesh": init_device_mesh("cpu", (2, 1))}),
        (
            parallelize_module(nn.Linear(4, 4, bias=False), mesh["tp"], ColwiseParallel()),
            {"mesh": mesh["dp"]},
        ),
    ):
        model: Any = fsdp_ext.fully_shard(model, **options)
        reference.zero_grad()
        model.set_requires_all_reduce(False)
        if "dp" in (options["mesh"].mesh_dim_names or ()):
            model.set_requires_gradient_sync(False)
        for value in (1.0, 2.0):
            inputs = torch.full((2, 4), value)
            reference(inputs).sum().backward()
            model(inputs).sum().backward()
        gradient, partial_sum = model.get_pending_gradients()[model.weight]
        assert partial_sum is None
        expect_equal(gradient, reference.weight.grad)
        gradient.mul_(2)
        model.synchronize_gradients()
        expect_equal(model.weight.grad, 2 * reference.weight.grad)


def test_replicas_and_tensor_parallel_parameters_show_theirs() -> None:
    run_ranks(_with_replicas_and_tensor_parallelism, 2)
