"""Timed steps on a model that is left as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ext._util.losses import check_loss
from fsdp_ext.sharding.agreement import together
from fsdp_ext.sharding.unit import Unit


class Trial:
    """Forward and backward of a model on one batch.

    Args:
        model: the model.
        batch: a tensor, a tuple of arguments, or a mapping of keywords.
        loss: makes a scalar of the output.
        unit: any unit of the model; its device is waited for.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], unit: Unit
    ) -> None:
        self._model = model
        self._batch = batch
        self._loss = loss
        self._unit = unit

    def step(self) -> float:
        """Run forward and backward; return the seconds."""
        self._synchronize()
        start = time.perf_counter()
        try:
            torch.autograd.backward(self._loss(self._forward()))
            self._synchronize()
            return time.perf_counter() - start
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None

    def first_step(self) -> None:
        """Run a step. If it fails on one rank between collectives, all ranks raise.

        Raises:
            TypeError: if the loss is not a tensor.
            ValueError: if it is not a scalar that requires a gradient.
            Exception: what the model or the loss raises; see
                :func:`fsdp_ext.sharding.agreement.together`.
        """
        with together(self._unit, "tune", "forward"):
            output = self._forward()
        with together(self._unit, "tune", "the loss"):
            loss = self._loss(output)
            check_loss(loss, "tune")
        with together(self._unit, "tune", "backward"):
            torch.autograd.backward(loss)
            self._synchronize()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _forward(self) -> Any:
        if isinstance(self._batch, Mapping):
            return self._model(**self._batch)
        return self._model(*(self._batch if isinstance(self._batch, tuple) else (self._batch,)))

    def _synchronize(self) -> None:
        if self._unit.device.type == "cuda":
            torch.cuda.synchronize(self._unit.device)


# - Restoring the model


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, batch: Any, units: list[Unit]) -> Iterator[None]:
    """Restore shards, buffers, the batch's gradients and the random state at the end.

    Parameters may change, since hooks of the model may run an optimizer in backward. Only this
    rank's shards are copied. Parameters have no gradients afterwards.

    Args:
        model: the model; its buffers are restored.
        batch: its tensors may have gradients of their own, which are restored.
        units: the units of the model; their shards are restored.
    """
    device = units[0].device
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices=devices),
        _gradients_kept(batch),
        _buffers_kept(model),
        _shards_kept(units),
    ):
        try:
            yield
        finally:
            for parameter in model.parameters():
                parameter.grad = None


@contextlib.contextmanager
def _shards_kept(units: list[Unit]) -> Iterator[None]:
    before = [[shard.clone() for shard in _shards(unit)] for unit in units]
    try:
        yield
    finally:
        for unit in units:
            if unit.root is not None and unit.core is not None:
                unit.root.reshard(unit)  # an unsharded copy has the values that are replaced
        with torch.no_grad():
            for unit, shards in zip(units, before, strict=True):
                for shard, kept in zip(_shards(unit), shards, strict=True):
                    shard.copy_(kept)


def _shards(unit: Unit) -> list[Tensor]:
    """Return this rank's rows of each parameter.

    They are those of the parameter that the module has: after ``module.to()`` and the like it is
    not in the flat shard until the next forward. If the module has the unsharded parameter at the
    moment, they are those of the flat shard.
    """
    result = []
    for param in unit.params:
        parameter = param.registered()
        local = parameter._local_tensor if isinstance(parameter, DTensor) else param.local
        result.append(local.detach())
    return result


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers and their values, since forward may write to them or assign others."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                module._buffers[name] = buffer


@contextlib.contextmanager
def _gradients_kept(batch: Any) -> Iterator[None]:
    # Backward adds in place to an existing gradient, so the tensors must not have one.
    leaves = [
        (leaf, leaf.grad)
        for leaf in torch.utils._pytree.tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
    ]
    for leaf, _ in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in leaves:
            leaf.grad = gradient
