"""Two copies of a model that train side by side, one of them unsharded, and are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_ext.sharding.root.module_state import unit_of
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.verifier.comparison import Comparison
from fsdp_ext.verifier.expected_gradients import Reduction
from fsdp_ext.verifier.peers import exchange, gather
from fsdp_ext.verifier.random_state import random_state_kept
from fsdp_ext.verifier.subject import LR, Preparation, Subject, computing_in, no_preparation

# Called with the sharded copy's root before forward and before backward, except before the first.
Disturb = Callable[[Root], None]


@dataclass(frozen=True)
class Way:
    """How a check trains."""

    prepare: Preparation = no_preparation  # changes a copy before its forward
    disturb: Disturb = lambda root: None
    forwards: int = 1  # how many forwards come before a backward
    steps: int = 2
    # Whether backward reaches the same units on every rank. If not, a rank sends zeros for the
    # units that its backward does not reach.
    reaches_all: bool = True


@dataclass
class Trainee:
    """A copy that trains."""

    model: nn.Module
    subject: Subject
    way: Way
    weight: float = 1.0

    def step(self) -> list[tuple[str, Tensor]]:
        """Run forward and backward; return the losses and the gradients of the batch by name."""
        is_sharded = unit_of(self.model) is not None
        policy = self.subject.policy
        losses, leaves = [], []
        with contextlib.nullcontext() if is_sharded else computing_in(self.model, policy):
            self._disturb()
            for _ in range(self.way.forwards):
                loss, of_batch = self.subject.forward_and_loss(self.model, self.weight)
                losses.append(loss)
                leaves += of_batch
            self._disturb()
            torch.autograd.backward(losses)
        names = ["the loss", *(f"the loss of forward {n}" for n in range(2, len(losses) + 1))]
        seen = [(name, loss.detach()) for name, loss in zip(names, losses, strict=True)]
        for number, leaf in enumerate(leaves):
            if leaf.grad is not None:
                seen.append((f"tensor {number} of the batch", leaf.grad))
        return seen

    def _disturb(self) -> None:
        unit = unit_of(self.model)
        root: Root | None = None if unit is None else unit.root
        if root is not None and not root.is_provisional:
            self.way.disturb(root)

    def update(self) -> None:
        """Run an optimizer's step and clear the gradients."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        optimizer.step()
        optimizer.zero_grad()


def train_beside(subject: Subject, mesh: DeviceMesh, way: Way) -> Comparison:
    """Train an unsharded copy beside a sharded one, and compare them after each step."""
    weight = 1 + dist.get_rank() % 4 / 4  # exact in every dtype
    plain = Trainee(subject.plain(way.prepare), subject, way, weight)
    sharded = Trainee(subject.sharded(mesh, way.prepare), subject, way, weight)
    if not way.reaches_all:
        model: Any = sharded.model
        model.set_reduce_scatter_unused_params(True)
    comparison = Comparison()
    for step in range(1, way.steps + 1):
        with random_state_kept():
            expected = plain.step()
        seen = sharded.step()
        comparison.transport = _root_of(sharded.model).lanes.transport
        comparison.when = f" (step {step})"
        for (name, value), (_, other) in zip(expected, seen, strict=True):
            comparison.add(name, "the value", value, other, of_model=False)
        _compare_gradients(comparison, plain.model, sharded.model, way)
        plain.update()
        sharded.update()
        _compare_state(comparison, plain.model, sharded.model)
        if comparison.conclude():
            break
    return comparison


def _root_of(model: nn.Module) -> Root:
    unit = unit_of(model)
    assert unit is not None
    root: Root = unit.root
    return root


def _compare_gradients(
    comparison: Comparison, plain: nn.Module, sharded: nn.Module, way: Way
) -> None:
    """Compare averaged gradients, and give them to the unsharded copy."""
    reductions = Reduction.by_parameter(_root_of(sharded))
    params = dict(plain.named_parameters())
    dtypes = exchange({name: p.grad.dtype for name, p in params.items() if p.grad is not None})
    for name, shard in sharded.named_parameters():
        param = params[name]
        if not shard.requires_grad or shard not in reductions:
            param.grad = None
            continue
        seen = None if shard.grad is None else rows_of(shard.grad)
        users = {rank: of_rank[name] for rank, of_rank in enumerate(dtypes) if name in of_rank}
        if not users:
            # set_reduce_scatter_unused_params(True) gives zeros to parameters that no rank uses.
            expected = None if seen is None or way.reaches_all else torch.zeros_like(seen)
            comparison.add(name, "its gradient", expected, seen)
            continue
        reduction, own = reductions[shard], param.grad
        if own is None:
            own = torch.zeros_like(param, dtype=next(iter(users.values())))
        gradients = [g if rank in users else None for rank, g in enumerate(gather(own))]
        result = reduction.result(gradients, param)
        bound = None if reduction.is_exact else _rows(reduction.bound(gradients, param), shard)
        untried = reduction.untried(len(gradients))
        comparison.add(name, "its gradient", _rows(result, shard), seen, bound, untried=untried)
        if not reduction.is_exact and isinstance(shard.grad, DTensor):
            result = shard.grad.full_tensor()  # so that rounding does not add up over steps
        param.grad = result


def _compare_state(comparison: Comparison, plain: nn.Module, sharded: nn.Module) -> None:
    for name, shard in sharded.named_parameters():
        expected = _rows(plain.get_parameter(name).detach(), shard)
        comparison.add(name, "the parameter after the step", expected, rows_of(shard.detach()))
    for name, buffer in sharded.named_buffers():
        comparison.add(name, "the buffer after the step", plain.get_buffer(name), buffer)


def rows_of(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(whole: Tensor, shard: nn.Parameter) -> Tensor:
    """Return the rows of ``whole`` that ``shard`` has on this rank."""
    if not isinstance(shard, DTensor):
        return whole
    size, rank = shard.device_mesh.size(), shard.device_mesh.get_local_rank()
    chunk = -(-whole.shape[0] // size)
    first = min(rank * chunk, whole.shape[0])
    return whole[first : first + chunk]
