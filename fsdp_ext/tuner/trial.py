"""Steps that are run to be timed, after which the model is as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ext.sharding.agreement import together
from fsdp_ext.sharding.unit import Unit


class Trial:
    """Forward and backward of a model on one batch.

    Args:
        model: what is called.
        batch: a tensor, a tuple of arguments, or a mapping of keywords.
        loss: makes a scalar of the output.
        unit: any of the model's, of the device that is waited for.
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
        """Run a step whose forward, loss and backward all ranks get through, or none.

        Raises:
            TypeError: if the loss is no tensor.
            ValueError: if it is no scalar with a gradient.
            Exception: whatever the model or the loss raises; see
                :func:`fsdp_ext.agreement.together`.
        """
        with together(self._unit, "tune", "forward"):
            output = self._forward()
        with together(self._unit, "tune", "the loss"):
            loss = self._loss(output)
            _check_loss(loss)
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


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"tune expects loss to return a tensor but got {type(loss).__name__}; return the "
            "scalar that backward begins with"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "tune expects loss to return a scalar that requires a gradient but got one of shape "
            f"{tuple(loss.shape)} with requires_grad={loss.requires_grad}; reduce it, and make it "
            "of the model's output"
        )


def mean_of_output(output: Any) -> Tensor:
    """Return the mean of the output's floating-point tensors, as a loss where there is none.

    Raises:
        ValueError: if it has none that require gradients.
    """
    tensors = [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not tensors:
        raise ValueError(
            "tune expects a model whose output has floating-point tensors that require gradients "
            "but got none; pass loss=, which makes a scalar of the output"
        )
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


# - What stays


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, batch: Any, units: list[Unit]) -> Iterator[None]:
    """Restore shards, buffers, the batch's gradients and the state of random numbers at the end.

    Parameters change where the model's hooks run an optimizer in backward. The copy of them is a
    shard of each unit's. Parameters have no gradients afterwards.

    Args:
        model: whose buffers those are.
        batch: whose tensors may have gradients of their own.
        units: of the model, whose parameters are kept.
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
                unit.root.reshard(unit)  # what is unsharded still is of the values to be replaced
        with torch.no_grad():
            for unit, shards in zip(units, before, strict=True):
                for shard, kept in zip(_shards(unit), shards, strict=True):
                    shard.copy_(kept)


def _shards(unit: Unit) -> list[Tensor]:
    """Return this rank's rows of each parameter.

    The module's own, which after ``module.to()`` and the like is not in the flat shard before the
    next forward; but not where the module has the unsharded one for the moment.
    """
    result = []
    for param in unit.params:
        parameter = param.registered()
        local = parameter._local_tensor if isinstance(parameter, DTensor) else param.local
        result.append(local.detach())
    return result


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Keep the tensors and what is in them, since a forward may write them or assign others."""
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
    # Backward adds to a gradient that is there in place, so it must not find one.
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
