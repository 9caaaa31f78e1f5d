"""Two copies of a model that train side by side, one of them unsharded, and are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_ext.sharding.root.module_state import unit_of
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.verifier.numbers import Reduction
from fsdp_ext.verifier.peers import Peers
from fsdp_ext.verifier.random_state import RandomState
from fsdp_ext.verifier.subject import (
    LR,
    Preparation,
    Subject,
    computing_in,
    forward_and_loss,
    reductions_of,
    root_of,
)

# Called with the sharded copy's root before forward and before backward; None before the first one.
Disturb = Callable[[Root | None], None]


@dataclass(frozen=True)
class Difference:
    """The first difference between the two copies.

    Args:
        parameter: the first parameter, buffer or other value that differs.
        what: the first difference: its place and size.
        rank: the first rank that sees it.
    """

    parameter: str
    what: str
    rank: int = 0


@dataclass(frozen=True, order=True)
class _Found:
    """A difference on this rank: its place among everything compared, and what differs."""

    place: int
    name: str
    what: str
    of_model: bool  # a parameter or a buffer

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass
class Compared:
    """The comparison so far.

    Args:
        difference: the first difference of the lowest rank; None if everything was equal.
        values: how many elements this rank has compared.
        is_exact: whether all of them were compared bit for bit.
        transport: the transport of the collectives; empty if none ran.
    """

    difference: Difference | None = None
    values: int = 0
    is_exact: bool = True
    transport: str = ""


def transport_of(root: Root) -> str:
    """Return the transport of a root's collectives."""
    return "threads that take turns" if root.lanes.is_inline else root.lanes.transport


@dataclass(frozen=True)
class Way:
    """How a check trains.

    Args:
        prepare: changes a copy before its forward.
        disturb: disturbs a sharded copy.
        forwards: how many forwards come before a backward.
        steps: how many steps are taken.
        reaches_all: whether backward reaches the same units on every rank. If not, a rank sends
            zeros for the units that its backward does not reach.
    """

    prepare: Preparation = lambda model: None
    disturb: Disturb = lambda root: None
    forwards: int = 1
    steps: int = 2
    reaches_all: bool = True


class Trainee:
    """A copy that trains.

    Args:
        model: the copy.
        subject: the subject that was copied.
        way: how it trains.
        weight: the factor of this rank's loss.
    """

    def __init__(self, model: nn.Module, subject: Subject, way: Way, weight: float) -> None:
        self.model = model
        self._subject = subject
        self._policy = subject.policy
        self._way = way
        self._weight = weight

    def step(self, *, is_sharded: bool) -> list[tuple[str, Tensor]]:
        """Run forward and backward; return the loss and the gradients of the batch by name."""
        with contextlib.nullcontext() if is_sharded else computing_in(self.model, self._policy):
            return self._forward_and_backward(is_sharded)

    def _forward_and_backward(self, is_sharded: bool) -> list[tuple[str, Tensor]]:
        seen: list[tuple[str, Tensor]] = []
        losses, leaves = [], []
        self._disturb(is_sharded)
        for _ in range(self._way.forwards):
            loss, of_batch = forward_and_loss(
                self.model, self._subject.batch, self._subject.loss, self._weight
            )
            losses.append(loss)
            leaves += of_batch
        self._disturb(is_sharded)
        torch.autograd.backward(losses)
        for number, loss in enumerate(losses):
            seen.append((f"the loss{_ordinal(number)}", loss.detach()))
        for number, leaf in enumerate(leaves):
            if leaf.grad is not None:
                seen.append((f"tensor {number} of the batch", leaf.grad))
        return seen

    def _disturb(self, is_sharded: bool) -> None:
        unit = unit_of(self.model)
        if is_sharded and unit is not None:
            root: Root | None = unit.root
            self._way.disturb(None if root is None or root.is_provisional else root)

    def update(self) -> None:
        """Run an optimizer's step and clear the gradients."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        optimizer.step()
        optimizer.zero_grad()


def _ordinal(number: int) -> str:
    return "" if number == 0 else f" of forward {number + 1}"


def train_beside(subject: Subject, peers: Peers, mesh: DeviceMesh, way: Way) -> Compared:
    """Train an unsharded copy beside a sharded one, and compare them after each step."""
    weight = 1 + peers.rank % 4 / 4  # exact in every dtype
    plain = Trainee(subject.plain(way.prepare), subject, way, weight)
    sharded = Trainee(subject.sharded(way.prepare, mesh), subject, way, weight)
    if not way.reaches_all:
        root: Any = sharded.model
        root.set_reduce_scatter_unused_params(True)
    compared = Compared()
    for step in range(1, way.steps + 1):
        state = RandomState.now()
        expected = plain.step(is_sharded=False)
        state.restore()
        seen = sharded.step(is_sharded=True)
        compared.transport = transport_of(root_of(sharded.model))
        comparison = Comparison(peers, compared, f" (step {step})")
        comparison.add_all(expected, seen)
        _compare_gradients(comparison, plain.model, sharded.model, way)
        plain.update()
        sharded.update()
        _compare_state(comparison, plain.model, sharded.model)
        if comparison.conclude():
            break
    return compared


class Comparison:
    """Collects the differences that this rank sees, and finds the first one of all ranks.

    Args:
        peers: all ranks.
        compared: gets the result.
        when: ends the message, for example the number of the step.
    """

    def __init__(self, peers: Peers, compared: Compared, when: str = "") -> None:
        self.peers = peers
        self.compared = compared
        self._when = when
        self._place = 0
        self._found: list[_Found] = []

    def add(self, name: str, what: str, expected: Any, seen: Any, bound: Any = None) -> None:
        """Compare two tensors of the model bit for bit, or within ``bound``."""
        self._add(name, what, expected, seen, bound, of_model=True)

    def add_all(self, expected: list[tuple[str, Tensor]], seen: list[tuple[str, Tensor]]) -> None:
        """Compare losses and gradients of the batch, which ranks compute alone."""
        for (name, value), (_, other) in zip(expected, seen, strict=True):
            self._add(name, "the value", value, other, None, of_model=False)

    def conclude(self) -> bool:
        """Tell all ranks the first difference of any; return whether there is one."""
        own = [
            min(self._found, default=None),
            min((each for each in self._found if each.of_model), default=None),
        ]
        of_ranks = self.peers.exchange(own)
        first = _first([of_rank[0] for of_rank in of_ranks])
        if first is None:
            return False
        found, rank = first
        of_model = _first([of_rank[1] for of_rank in of_ranks])
        named = found if of_model is None else of_model[0]
        what = str(found) if named == found else f"{found}; the first parameter is {named}"
        self.compared.difference = Difference(named.name, what, rank)
        return True

    def _add(
        self, name: str, what: str, expected: Any, seen: Any, bound: Any, *, of_model: bool
    ) -> None:
        self._place += 1
        text = ""
        if expected is None or seen is None:
            if (expected is None) != (seen is None):
                has, lacks = ("unsharded", "sharded")[:: 1 if seen is None else -1]
                text = f"is None in the {lacks} model, not in the {has} one"
        else:
            self.compared.values += expected.numel()
            self.compared.is_exact &= bound is None
            text = _difference(expected, seen, bound)
        if text:
            self._found.append(_Found(self._place, name, f"{what} {text}{self._when}", of_model))


def _first(found: list[_Found | None]) -> tuple[_Found, int] | None:
    """Return the first difference of all ranks, and the lowest rank that sees it."""
    differences = [(each, rank) for rank, each in enumerate(found) if each is not None]
    return min(differences, key=lambda one: (one[0].place, one[1]), default=None)


def _difference(expected: Tensor, seen: Tensor, bound: Tensor | None) -> str:
    """Return in words where tensors first differ; empty if they agree."""
    if (expected.shape, expected.dtype) != (seen.shape, seen.dtype):
        return f"is {tuple(seen.shape)} {seen.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    # NaN in both counts as equal.
    same = (expected == seen) | (expected.isnan() & seen.isnan())
    if bound is not None:
        same |= (expected.double() - seen.double()).abs() <= bound
    if bool(same.all()):
        return ""
    count = int((~same).sum())
    place = int((~same).reshape(-1).int().argmax())
    index = list(torch.unravel_index(torch.tensor(place), same.shape)) if same.ndim else []
    where = f" at {[int(i) for i in index]}" if index else ""
    return (
        f"differs in {count:,} of {same.numel():,} values, first{where}: "
        f"{seen.reshape(-1)[place].item():.9g}, unsharded {expected.reshape(-1)[place].item():.9g}"
    )


def _compare_gradients(
    comparison: Comparison, plain: nn.Module, sharded: nn.Module, way: Way
) -> None:
    """Compare averaged gradients, and give them to the unsharded copy."""
    reductions = reductions_of(root_of(sharded))
    params = dict(plain.named_parameters())
    used = comparison.peers.exchange([name for name, p in params.items() if p.grad is not None])
    for name, shard in sharded.named_parameters():
        param = params[name]
        if not shard.requires_grad or shard not in reductions:
            param.grad = None
            continue
        users = [rank for rank, names in enumerate(used) if name in names]
        if not users:
            seen = None if shard.grad is None else rows_of(shard.grad)
            # set_reduce_scatter_unused_params(True) gives zeros to parameters that no rank uses.
            expected = None if seen is None or way.reaches_all else torch.zeros_like(seen)
            comparison.add(name, "its gradient", expected, seen)
            continue
        param.grad = _compare_gradient(comparison, name, param, shard, reductions[shard], users)


def _compare_gradient(
    comparison: Comparison,
    name: str,
    param: nn.Parameter,
    shard: nn.Parameter,
    reduction: Reduction,
    users: list[int],
) -> Tensor:
    dtype = _dtype_of_gradients(comparison, param)
    own = param.grad if param.grad is not None else torch.zeros_like(param, dtype=dtype)
    gathered = comparison.peers.gather(own)
    gradients = [g if rank in users else None for rank, g in enumerate(gathered)]
    result = reduction.result(gradients, param)
    seen = None if shard.grad is None else rows_of(shard.grad)
    bound = None if reduction.is_exact else _rows(reduction.bound(gradients, param), shard)
    comparison.add(name, "its gradient", _rows(result, shard), seen, bound)
    if not reduction.is_exact and isinstance(shard.grad, DTensor):
        return shard.grad.full_tensor()  # so that rounding does not add up over steps
    return result


def _dtype_of_gradients(comparison: Comparison, param: nn.Parameter) -> torch.dtype:
    dtypes = comparison.peers.exchange(None if param.grad is None else param.grad.dtype)
    return next((dtype for dtype in dtypes if dtype is not None), param.dtype)


def _compare_state(comparison: Comparison, plain: nn.Module, sharded: nn.Module) -> None:
    params, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    for name, shard in sharded.named_parameters():
        comparison.add(
            name,
            "the parameter after the step",
            _rows(params[name].detach(), shard),
            rows_of(shard.detach()),
        )
    for name, buffer in sharded.named_buffers():
        comparison.add(name, "the buffer after the step", buffers[name], buffer)


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
