"""Lent gradients come back in order with streams of the user, and their padding is zero."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import Tensor, nn

from fsdp_ext import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp_ext.optim import AdamW

WIDTH = 33  # flat gradients have padding
LAYERS = 4


class _Layers(nn.Sequential):
    def forward(self, x: Tensor, left_out: int = LAYERS) -> Tensor:
        for index, layer in enumerate(self):
            x = layer(x) if index != left_out else x
        return x


def _model(**options: Any) -> Any:
    os.environ["FSDP_EXT_NCCL_REGISTER"] = "0"
    torch.manual_seed(0)
    model = _Layers(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    layers: Any = list(model)
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _input() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, WIDTH).cuda()


def _step(model: Any, x: Tensor) -> None:
    """Train a step without an optimizer's state, and drop the gradients."""
    model(x).square().mean().backward()
    _apply(model)


@torch.no_grad()
def _apply(model: Any) -> None:
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
    model.zero_grad()


def _tensors_of_many_sizes() -> list[Tensor]:
    """Take what torch's allocator has for the current stream."""
    return [torch.full((size,), 7.0, device="cuda") for size in range(16, 2048, 32)]


def _parameters(model: Any) -> list[Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]


def _backward_elsewhere() -> None:
    model, x = _model(bucket_bytes=0), _input()
    for _ in range(2):
        _step(model, x)
    loss = model(x).square().mean()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        loss.backward()
    model.zero_grad()
    model(x)  # lends gradients whose reductions only `other` has waited for
    taken = _tensors_of_many_sizes()
    torch.cuda.synchronize()
    assert all(tensor.eq(7).all() for tensor in taken)


def _asked_elsewhere() -> None:
    expected, model, x = _model(bucket_bytes=0), _model(bucket_bytes=0), _input()
    for _ in range(3):
        _step(expected, x)
    for _ in range(2):
        _step(model, x)
    loss = model(x).square().mean()
    with torch.cuda.stream(torch.cuda.Stream()):
        _, flat = model[1].flat_shard()
    loss.backward()
    assert flat.isfinite().all()
    _apply(model)
    assert all(map(torch.equal, _parameters(model), _parameters(expected)))


def _planned_elsewhere() -> None:
    expected, model, x = _model(bucket_bytes=0), _model(bucket_bytes=0), _input()
    for _ in range(4):
        _step(expected, x)
    _step(model, x)
    model(x).square().mean().backward()
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        for layer in model[1:]:
            layer.set_modules_to_forward_prefetch([model[0]])
        model(x)  # plans memory, while gradients exist
        here.wait_stream(other)
        _apply(model)
        loss = model(x).square().mean()
        with torch.cuda.stream(here):
            taken = _tensors_of_many_sizes()
        loss.backward()
        _apply(model)
        _step(model, x)
    here.wait_stream(other)
    assert all(tensor.eq(7).all() for tensor in taken)
    assert all(map(torch.equal, _parameters(model), _parameters(expected)))


def _moved_to_another_stream() -> None:
    model, x = _model(bucket_bytes=0), _input()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _step(model, x)
        model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    _apply(model)
    model(x)  # lends memory of `side`, which has not waited for this stream
    with torch.cuda.stream(side):
        taken = _tensors_of_many_sizes()
    unit = model[1]._fsdp_ext_unit
    assert unit.impl.flat_gradient().data_ptr() == 0
    _step(model, x)
    model(x)
    assert unit.impl.flat_gradient().data_ptr() == 0
    torch.cuda.synchronize()
    assert all(tensor.eq(7).all() for tensor in taken)


WORKERS = [_backward_elsewhere, _asked_elsewhere, _planned_elsewhere, _moved_to_another_stream]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("worker", WORKERS)
def test_streams_of_the_user_are_ordered_with_lent_gradients(worker: Callable[[], None]) -> None:
    run_ranks(worker, 2, timeout=80.0, device="cuda")


def _train_while_buckets_change(*, changes: bool) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _model(mp_policy=policy)
    optimizer = AdamW(model.parameters(), lr=0.01)
    results = []

    def backward(*, apart: bool, left_out: int = LAYERS) -> None:
        model[1].set_reshard_after_forward(not (apart and changes), recurse=False)
        model(_input(), left_out).float().square().mean().backward()

    parameters = list(model.parameters())
    for apart in (False, False, True, True, False):
        backward(apart=apart)
        norm: Any = clip_grad_norm_(parameters, 1.0)
        results.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
        if len(results) == 4:
            # Gradients of one unit stay lent, while the others exist.
            backward(apart=True, left_out=1)
    return results + _parameters(model)


def _merge_with_lent() -> None:
    expected = _train_while_buckets_change(changes=False)
    got = _train_while_buckets_change(changes=True)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.timeout(90)
def test_gradients_that_are_lent_may_move_to_another_bucket() -> None:
    run_ranks(_merge_with_lent, 2, timeout=80.0, device="cuda")
