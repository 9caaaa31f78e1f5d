"""The checks of ``verify``, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from fsdp_ext._util.losses import check_loss
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.verifier.peers import Peers
from fsdp_ext.verifier.random_state import RandomState
from fsdp_ext.verifier.result import Check
from fsdp_ext.verifier.steps import (
    Compared,
    Comparison,
    Trainee,
    Way,
    rows_of,
    train_beside,
)
from fsdp_ext.verifier.subject import Subject

DELAY = 0.002  # seconds that a stream pauses
_DELAYS = 20  # pauses of each stream in a step, at most
_CANDIDATES = 8  # units that are tried as the one that some ranks do not use


@dataclass(frozen=True)
class Site:
    """Where checks run.

    Args:
        subject: the subject of the check.
        peers: the ranks.
        mesh: the mesh of these ranks, to shard over.
    """

    subject: Subject
    peers: Peers
    mesh: DeviceMesh

    def beside(self, way: Way) -> Compared:
        """Train an unsharded and a sharded copy side by side."""
        return train_beside(self.subject, self.peers, self.mesh, way)


class _NotTried(Exception):
    """A check does not apply to this model."""


def run_checks(site: Site, checks: dict[str, Callable[[Site], Compared]]) -> Iterator[Check]:
    """Yield the result of each check. No check is tried after one that raised an error."""
    has_raised = False
    for name, check in checks.items():
        if has_raised:
            yield Check(name, None, "the check before raised an error")
            continue
        result, has_raised = _attempt(name, check, site)
        yield result


def _attempt(name: str, check: Callable[[Site], Compared], site: Site) -> tuple[Check, bool]:
    """Return the result of a check, the same on all ranks, and whether it raised an error."""
    compared, error, reason = Compared(), None, None
    try:
        compared = check(site)
    except _NotTried as not_tried:
        reason = str(not_tried)
    except Exception as raised:
        # The text alone: a traceback would keep the copies alive.
        error = f"{type(raised).__name__}: {raised}"
    errors = site.peers.exchange(error)
    first = next((rank for rank, text in enumerate(errors) if text is not None), None)
    if first is not None:
        return Check(name, False, f"rank {first} raised {errors[first]}"), True
    if reason is not None:
        return Check(name, None, reason), False
    found = compared.difference
    result = Check(
        name,
        True,
        values=compared.values,
        is_exact=compared.is_exact,
        transport=compared.transport,
    )
    if found is None:
        return result, False
    detail = f"{found.what}, on rank {found.rank}"
    return replace(result, ok=False, detail=detail, parameter=found.parameter), False


# - The checks


def unsharded_twice(site: Site) -> Compared:
    """Check that two unsharded runs are equal. Otherwise nothing else can be compared."""
    runs = []
    state = RandomState.now()
    for _ in range(2):
        state.restore()
        trainee = Trainee(site.subject.plain(_nothing), site.subject, Way(), 1.0)
        seen = [*trainee.step(is_sharded=False), *_state_of(trainee.model)]
        runs.append(seen)
    return _compare_runs(site, runs)


def steps(site: Site) -> Compared:
    """Train as usual."""
    return site.beside(Way())


def disturbed(site: Site) -> Compared:
    """Fill released slots with NaN, and let streams pause, so that early reads show."""
    disturbance = Disturbance()
    return site.beside(Way(disturbance.watch, disturbance, steps=3))


def unused(site: Site) -> Compared:
    """Cut a unit off the loss, on every second rank if ranks may differ."""
    name = _cuttable_unit(site)
    peers = site.peers

    def cut(model: nn.Module) -> None:
        if peers.rank % 2 == 1 or peers.size == 1 or not peers.may_differ:
            model.get_submodule(name).register_forward_hook(_detach_output)

    disturbance = Disturbance()
    return site.beside(Way(cut, disturbance, reaches_all=not peers.may_differ))


def two_forwards(site: Site) -> Compared:
    """Use each unit in two forwards before a backward."""
    return site.beside(Way(disturb=Disturbance(), forwards=2))


def sharded_twice(site: Site) -> Compared:
    """Train two sharded copies, the second one with streams that pause."""
    runs = []
    state = RandomState.now()
    for way in (Way(), Way(disturb=Disturbance())):
        state.restore()
        trainee = Trainee(site.subject.sharded(_nothing, site.mesh), site.subject, way, 1.0)
        seen: list[tuple[str, Any]] = []
        for _ in range(way.steps):
            seen += trainee.step(is_sharded=True)
            seen += _state_of(trainee.model)
            trainee.update()
        runs.append(seen)
    return _compare_runs(site, runs)


ALL: dict[str, Callable[[Site], Compared]] = {
    "the unsharded model, twice": unsharded_twice,
    "two steps, beside the unsharded model": steps,
    "released slots poisoned, streams delayed": disturbed,
    "a unit whose output is unused": unused,
    "two forwards, then backward": two_forwards,
    "the sharded model, twice": sharded_twice,
}

# The checks that threads as ranks cannot do, for one rank.
WITH_STREAMS: dict[str, Callable[[Site], Compared]] = {
    "the same on one rank, with streams of its own": disturbed,
}


def _nothing(model: nn.Module) -> None:
    pass


class Disturbance:
    """Poisons released slots and lets streams pause, where the lanes have streams of their own."""

    def __init__(self) -> None:
        self._root: Root | None = None
        self._left = 0

    def __call__(self, root: Root | None) -> None:
        """Disturb a sharded copy before its forward or its backward."""
        if root is None:
            return
        root.impl.set_poison_released_slots(True)
        self._root = root
        self._left = _DELAYS
        self._delay()

    def watch(self, model: nn.Module) -> None:
        """Let streams pause before each module of a copy, too."""
        for module in model.modules():
            module.register_forward_pre_hook(self._before_module)

    def _before_module(self, module: nn.Module, args: Any) -> None:
        self._delay()

    def _delay(self) -> None:
        if self._root is not None and self._left > 0 and not self._root.lanes.is_inline:
            self._left -= 1
            self._root.impl.delay_stream("gather", DELAY)
            self._root.impl.delay_stream("reduce", DELAY)


def _cuttable_unit(site: Site) -> str:
    """Return a unit that can be cut off the loss, the same on all ranks."""
    names = site.subject.unit_names[::-1][:_CANDIDATES]
    if not names:
        raise _NotTried("the model is one unit")
    state = RandomState.now()
    answers = site.peers.exchange([_can_be_cut(site, name) for name in names])
    state.restore()
    for number, name in enumerate(names):
        if all(answer[number] for answer in answers):
            return name
    raise _NotTried("a loss without any one of the first units has no gradient")


def _can_be_cut(site: Site, name: str) -> bool:
    def cut(model: nn.Module) -> None:
        model.get_submodule(name).register_forward_hook(_detach_output)

    trainee = Trainee(site.subject.plain(cut), site.subject, Way(), 1.0)
    try:
        trainee.step(is_sharded=False)
    except (RuntimeError, ValueError):
        return False
    return True


def _detach_output(module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, output)


def _state_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return gradients, parameters and buffers: whole ones, or this rank's rows."""
    found: list[tuple[str, Any]] = []
    for name, param in model.named_parameters():
        found.append((name, None if param.grad is None else rows_of(param.grad).clone()))
        found.append((name, rows_of(param.detach()).clone()))
    return [*found, *((name, buffer.clone()) for name, buffer in model.named_buffers())]


def _compare_runs(site: Site, runs: list[list[tuple[str, Any]]]) -> Compared:
    compared = Compared()
    comparison = Comparison(site.peers, compared)
    for (name, first), (_, second) in zip(*runs, strict=True):
        comparison.add(name, "the second run", first, second)
    comparison.conclude()
    return compared


def check_same_parameters(site: Site) -> None:
    """Check that all ranks have the same model, as ``fully_shard`` expects.

    Raises:
        ValueError: if names, shapes, dtypes or values differ.
    """
    compared = Compared()
    comparison = Comparison(site.peers, compared)
    params = dict(site.subject.model.named_parameters())
    kinds = site.peers.exchange([(n, tuple(p.shape), str(p.dtype)) for n, p in params.items()])
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            different = [a for a, b in zip(kind, kinds[0], strict=False) if a != b]
            raise ValueError(
                f"verify got other parameters on rank {rank} than on rank 0, from "
                f"{(different or [*kind, *kinds[0]])[0]} on. Make the same model on all ranks."
            )
    for name, param in params.items():
        of_first = site.peers.gather(param.detach().to(site.subject.device))[0]
        comparison.add(name, "the parameter", of_first, param.detach().to(of_first.device))
    if comparison.conclude() and compared.difference is not None:
        raise ValueError(
            f"verify got different values of '{compared.difference.parameter}' on ranks 0 and "
            f"{compared.difference.rank}. Set the same seed on all ranks before making the model."
        )


def check_first_loss(site: Site) -> None:
    """Run the unsharded model once, so that its own errors are raised unchanged.

    Raises:
        TypeError: if the loss is not a tensor.
        ValueError: if it is not a scalar that requires a gradient.
        RuntimeError: if only other ranks raise an error.
    """
    subject = site.subject
    state = RandomState.now()
    error: Exception | None = None
    try:
        checked = replace(subject, loss=lambda output: _checked(subject.loss(output)))
        Trainee(checked.plain(_nothing), checked, Way(), 1.0).step(is_sharded=False)
    except Exception as raised:
        error = raised
    state.restore()
    texts = site.peers.exchange(None if error is None else f"{type(error).__name__}: {error}")
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback refers to this frame
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"verify: the unsharded model raised on rank {rank}: {text}")


def _checked(loss: Any) -> Tensor:
    check_loss(loss, "verify")
    assert isinstance(loss, Tensor)
    return loss
