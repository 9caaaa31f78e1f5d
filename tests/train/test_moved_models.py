"""A model whose parameters were moved or converted keeps none of its old memory, and trains on.

On the host, only a conversion to another dtype gives parameters other memory. `tests/gpu` moves
models between devices.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import TwoLayers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_ext
from fsdp_ext import FullyShardedDataParallel as FSDP
from fsdp_ext import clip_grad_norm_, fully_shard, profile
from fsdp_ext._util.errors import MisuseError
from fsdp_ext.optim import SGD

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy


def sharded(shard: Any = fully_shard, **settings: Any) -> Any:
    model = TwoLayers()
    for layer in model.layers:
        shard(layer, **settings)
    shard(model, **settings)
    return model


def wrapped(**settings: Any) -> Any:
    return FSDP(TwoLayers(), auto_wrap_policy=lambda module, recurse, **_: True, **settings)


def batch(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 4, generator=generator).to(next(model.parameters()).dtype)


def backward(model: Any, step: int) -> Tensor:
    loss: Tensor = model(batch(model, step)).square().sum()
    loss.backward()
    return loss.detach()


def train(model: Any, steps: range, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Memory:
    """Weak references to the memory that a model has now."""

    def __init__(self, model: Any) -> None:
        units = model._fsdp_ext_unit.root.units
        self._root = weakref.ref(units[0].root.impl)
        tensors = [unit.flat_shard for unit in units]
        tensors += [part for unit in units for part in unit.shard_parts]
        tensors += [unit.impl.flat_gradient() for unit in units]
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
        self._storages = list(map(StorageWeakRef, storages))

    def is_free(self) -> bool:
        of_storages = [each.expired() for each in self._storages]
        if self._root() is not None:
            assert not any(of_storages)
            return False
        assert all(of_storages), of_storages
        return True


def models() -> Iterator[Any]:
    yield from (sharded(), sharded(reshard_after_forward=False), sharded(bucket_bytes=0))
    yield from (wrapped(use_orig_params=is_kept) for is_kept in (True, False))


def convert_units(model: Any) -> None:
    for unit in model._fsdp_ext_unit.root.units:
        unit.modules[0].double()


def _frees() -> None:
    for convert in (move, nn.Module.double, convert_units):
        for model in models():
            optimizer = SGD(model.parameters(), lr=0.05)
            backward(model, 0)
            with profile(model) as recorded:
                loss = backward(model, 1)
                clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            memory = Memory(model)
            assert not memory.is_free()
            convert(model)
            assert memory.is_free()
            assert loss.isfinite()
            assert recorded.iterations
            train(model, range(2), optimizer)


def _after_a_forward(holds: bool) -> list[Tensor]:
    model = sharded()
    train(model, range(2))
    output = model(batch(model, 2))
    if not holds:
        del output
    model.double()
    model.prefetch_next_forward()
    return train(model, range(3))


def _prefetches() -> None:
    torch.testing.assert_close(
        _after_a_forward(holds=dist.get_rank() == 0), _after_a_forward(holds=False)
    )


def test_ranks_gather_nothing_ahead_after_a_conversion_whatever_graphs_they_hold() -> None:
    run_ranks(_prefetches, 2)


def test_a_conversion_frees_the_old_shards_gradients_and_buffers() -> None:
    run_ranks(_frees, 2)
    run_ranks(_frees, 1)


def move(model: Any) -> Any:
    """Give a model other memory. FSDP2 cannot convert one that has run forward."""
    return model._apply(torch.clone)


def _trains_on() -> None:
    for settings in ({}, {"reshard_after_forward": False}):
        found = []
        for shard in (fully_shard, torch_fully_shard):
            model = sharded(shard, **settings)
            losses = train(model, range(2))
            move(model)
            losses += train(model, range(2, 4))
            with torch.no_grad():
                losses.append(model(batch(model, 9)))
            move(move(model))
            losses += train(model, range(4, 6))
            found.append([*losses, *(param.full_tensor() for param in model.parameters())])
        assert all(map(torch.equal, *found))


def test_training_goes_on_as_under_fsdp2() -> None:
    run_ranks(_trains_on, 2)


def on_two_meshes(shard: Any, mesh: DeviceMesh) -> Any:
    model = TwoLayers()
    shard(model.layers[0], mesh=mesh["sharded"])
    for module in (model.layers[1], model):
        shard(module, mesh=init_device_mesh("cpu", (4,)))
    return model


def _trains_on_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
    makes: list[Callable[[Any], Any]] = [
        partial(on_two_meshes, mesh=mesh),
        partial(sharded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        partial(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    ]
    for make in makes:
        found = []
        for shard in (fully_shard, torch_fully_shard):
            model = make(shard)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
            losses = train(model, range(2), optimizer)
            model.set_requires_gradient_sync(False)
            losses.append(backward(model, 2))
            model.set_requires_gradient_sync(True)
            move(model)
            losses += train(model, range(3, 5), optimizer)
            found.append([*losses, *(param.full_tensor() for param in model.parameters())])
        assert all(map(torch.equal, *found))


def test_training_goes_on_with_replicas_as_under_fsdp2() -> None:
    run_ranks(_trains_on_with_replicas, 4)


def _wrapper_trains_on(strategies: Sequence[ShardingStrategy], **settings: Any) -> None:
    for is_kept, strategy in itertools.product((True, False), strategies):
        plain = TwoLayers()
        model = wrapped(use_orig_params=is_kept, sharding_strategy=strategy, **settings)
        losses = []
        for each in (plain, model):
            own = train(each, range(2))
            with each.no_sync() if each is model else contextlib.nullcontext():
                own.append(backward(each, 2))
            each.double()
            losses.append(own + train(each, range(3, 5)))
        assert all(map(torch.equal, *losses)), (is_kept, strategy)


def test_fsdp1s_wrapper_trains_on() -> None:
    run_ranks(_wrapper_trains_on, 2, [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])


def _hybrid_wrapper_trains_on() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    _wrapper_trains_on((HYBRID_SHARD, HYBRID_SHARD_ZERO2), device_mesh=mesh)


def test_fsdp1s_hybrid_wrapper_trains_on() -> None:
    run_ranks(_hybrid_wrapper_trains_on, 4)


def _accumulates() -> None:
    for calls in (
        lambda model: None,
        lambda model: model.get_pending_gradients(),
        lambda model: model.zero_grad(),
        lambda model: [model.float(), model.double()],
        convert_units,
    ):
        plain, model = TwoLayers(), sharded()
        for each in (plain, model):
            for step in range(3):
                if each is model:
                    each.set_requires_gradient_sync(step == 2)
                if step == 2:
                    memory = Memory(model) if each is model else None
                    each.double()
                    assert memory is None or memory.is_free()
                    if each is model:
                        calls(each)
                backward(each, step)
        for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), expected.grad)


def test_accumulated_gradients_survive() -> None:
    run_ranks(_accumulates, 2)


def _drops_accumulated() -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    model.double()
    model.reset_iter_state()
    assert model.get_pending_gradients() == {}
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    once = sharded().double()
    backward(once, 1)
    for param, expected in zip(model.parameters(), once.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad.full_tensor())


def test_reset_iter_state_drops_gradients_that_were_accumulated_before() -> None:
    run_ranks(_drops_accumulated, 2)


def unshard_and_wait(model: Any) -> None:
    model.unshard(async_op=True).wait()
    model.reshard()


def wait_late(model: Any) -> None:
    handle = model.unshard(async_op=True)
    model.float().double()
    handle.wait()


def refused_by(name: str, model: Any) -> None:
    with pytest.raises(RuntimeError, match="has run forward"):
        getattr(fsdp_ext, name)(model)


def finalize(model: Any) -> None:
    model.set_manual_backward_finalization(True)
    model.finalize_backward()
    model.finalize_backward(async_op=True).wait()
    model.set_manual_backward_finalization(False)


def attach_and_detach(model: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.05)
    optimizer.attach(model)
    optimizer.detach()


BETWEEN: list[Callable[[Any], Any]] = [
    lambda model: model.reshard(),
    lambda model: model.layers[0].reshard(),
    lambda model: model.zero_grad(),
    lambda model: model.state_dict(),
    lambda model: model.load_state_dict(model.state_dict()),
    lambda model: model.prefetch_next_forward(),
    lambda model: model.synchronize_gradients(),
    lambda model: model.reset_iter_state(),
    lambda model: model.set_is_last_backward(True),
    lambda model: model.set_requires_gradient_sync(True),
    lambda model: model.set_reshard_after_forward(True),
    lambda model: model.set_reshard_after_backward(True),
    lambda model: model.set_gradient_divide_factor(2.0),
    lambda model: model.layers[0].set_modules_to_forward_prefetch([model.layers[1]]),
    lambda model: fsdp_ext.plan(model),
    lambda model: clip_grad_norm_(model, 1.0),
    *(partial(refused_by, name) for name in ("describe_buckets", "profile", "health")),
    unshard_and_wait,
    wait_late,
    finalize,
    attach_and_detach,
]


def _calls_between() -> None:
    for settings in ({}, {"check_every": 1}):
        expected = sharded(**settings)
        train(expected, range(2))
        expected.double()
        of_expected = train(expected, range(2, 5))
        for call in BETWEEN:
            if settings and call is wait_late:
                continue
            model = sharded(**settings)
            train(model, range(2))
            model.double()
            call(model)
            assert all(map(torch.equal, train(model, range(2, 5)), of_expected)), call


def test_all_calls_work_between_a_conversion_and_the_next_forward() -> None:
    run_ranks(_calls_between, 2, timeout=100.0)


class Stop(Exception):
    """Raised in forward or backward."""


def stop(*_: Any) -> None:
    raise Stop


def _after_a_failure() -> None:
    for hook in ("register_forward_pre_hook", "register_full_backward_pre_hook"):
        expected, model = TwoLayers(), sharded()
        train(model, range(1))
        train(expected, range(1))
        handle = getattr(model.layers[0], hook)(stop)
        with pytest.raises(Stop):
            backward(model, 1)
        handle.remove()
        memory = Memory(model)
        model.double()
        expected.double()
        assert memory.is_free()
        assert all(map(torch.equal, train(model, range(3)), train(expected, range(3))))


def test_a_conversion_after_a_pass_that_failed_frees_memory() -> None:
    run_ranks(_after_a_failure, 2)


def _before_backward() -> None:
    expected, model = TwoLayers(), sharded()
    losses = []
    for each in (expected, model):
        train(each, range(1))
        losses.append(each(batch(each, 1)).square().sum())
    memory = Memory(model)
    for each in (expected, model):
        each.double()
    assert not memory.is_free()
    for loss in losses:
        loss.backward()
    for param, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), plain.grad)
    for each in (expected, model):
        each.zero_grad()
    assert all(map(torch.equal, train(model, range(3)), train(expected, range(3))))
    assert memory.is_free()


def test_a_graph_that_awaits_its_backward_keeps_the_memory() -> None:
    run_ranks(_before_backward, 2)


def _finalization() -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    backward(model, 0)
    model.double()
    with pytest.raises((RuntimeError, MisuseError), match="cannot change the mode"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)


def test_a_backward_that_is_not_finalized_stays_so() -> None:
    run_ranks(_finalization, 2)
