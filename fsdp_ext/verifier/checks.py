"""The checks of ``verify``, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from fsdp_ext.sharding.root.root import Root
from fsdp_ext.verifier.comparison import Comparison
from fsdp_ext.verifier.peers import exchange, gather
from fsdp_ext.verifier.random_state import random_state_kept
from fsdp_ext.verifier.result import Check
from fsdp_ext.verifier.steps import Trainee, Way, rows_of, train_beside
from fsdp_ext.verifier.subject import Preparation, Subject, no_preparation

DELAY = 0.002  # seconds that a stream pauses
_DELAYS = 20  # pauses of each stream in a step, at most
_CANDIDATES = 8  # units that are tried as the one that some ranks do not use


@dataclass(frozen=True)
class Site:
    """Where checks run."""

    subject: Subject
    mesh: DeviceMesh

    def beside(self, way: Way) -> Comparison:
        """Train an unsharded and a sharded copy side by side."""
        return train_beside(self.subject, self.mesh, way)

    def twice(self, make: Callable[[], nn.Module], *ways: Way) -> Comparison:
        """Train two copies in two ways, and compare them."""
        runs = []
        for way in ways:
            with random_state_kept():
                trainee = Trainee(make(), self.subject, way)
                seen: list[tuple[str, Tensor | None]] = []
                for _ in range(way.steps):
                    seen += [*trainee.step(), *_state_of(trainee.model)]
                    trainee.update()
            runs.append(seen)
        comparison = Comparison()
        for (name, first), (_, second) in zip(*runs, strict=True):
            comparison.add(name, "the second run", first, second)
        comparison.conclude()
        return comparison


class _NotTried(Exception):
    """A check does not apply to this model."""


def run_checks(site: Site) -> Iterator[Check]:
    """Yield the result of each check. No check is tried after one that raised an error."""
    has_raised = False
    for name, check in _ALL.items():
        if has_raised:
            yield Check(name, None, "the check before raised an error")
            continue
        result, has_raised = _attempt(name, check, site)
        yield result


def _attempt(name: str, check: Callable[[Site], Comparison], site: Site) -> tuple[Check, bool]:
    """Return the result of a check, the same on all ranks, and whether it raised an error."""
    result, error = None, None
    try:
        comparison = check(site)
        found = comparison.difference
        result = Check(
            name,
            ok=found is None,
            detail="" if found is None else f"{found.what}, on rank {found.rank}",
            parameter=None if found is None else found.parameter,
            values=comparison.values,
            is_exact=comparison.is_exact,
            transport=comparison.transport,
            untried=comparison.untried,
        )
    except _NotTried as not_tried:
        result = Check(name, None, str(not_tried))
    except Exception as raised:
        # The text alone: a traceback would keep the copies alive.
        error = f"{type(raised).__name__}: {raised}"
    errors = exchange(error)
    for rank, text in enumerate(errors):
        if text is not None:
            return Check(name, False, f"rank {rank} raised {text}"), True
    assert result is not None
    return result, False


# - The checks


def unsharded_twice(site: Site) -> Comparison:
    """Check that two unsharded runs are equal. Otherwise nothing else can be compared."""
    return site.twice(site.subject.plain, Way(steps=1), Way(steps=1))


def two_steps(site: Site) -> Comparison:
    """Train as usual."""
    return site.beside(Way())


def disturbed(site: Site) -> Comparison:
    """Fill released slots with NaN, and let streams pause, so that early reads show."""
    disturbance = Disturbance()
    return site.beside(Way(disturbance.watch, disturbance, steps=3))


def unused(site: Site) -> Comparison:
    """Cut a unit off the loss, on every second rank; a single rank cuts it off."""
    prepare = _cutting(_cuttable_unit(site))
    if dist.get_rank() % 2 == 0 and dist.get_world_size() > 1:
        prepare = no_preparation
    return site.beside(Way(prepare, Disturbance(), reaches_all=False))


def two_forwards(site: Site) -> Comparison:
    """Use each unit in two forwards before a backward."""
    return site.beside(Way(disturb=Disturbance(), forwards=2))


def sharded_twice(site: Site) -> Comparison:
    """Train two sharded copies, the second one with streams that pause."""
    return site.twice(lambda: site.subject.sharded(site.mesh), Way(), Way(disturb=Disturbance()))


_ALL: dict[str, Callable[[Site], Comparison]] = {
    "the unsharded model, twice": unsharded_twice,
    "two steps, beside the unsharded model": two_steps,
    "released slots poisoned, streams delayed": disturbed,
    "a unit whose output is unused": unused,
    "two forwards, then backward": two_forwards,
    "the sharded model, twice": sharded_twice,
}


class Disturbance:
    """Poisons released slots and lets streams pause, where the lanes have streams of their own."""

    def __init__(self) -> None:
        self._root: Root | None = None
        self._left = 0

    def __call__(self, root: Root) -> None:
        """Disturb a sharded copy before its forward or its backward."""
        root.impl.set_poison_released_slots(True)
        self._root = root
        self._left = _DELAYS
        self._delay()

    def watch(self, model: nn.Module) -> None:
        """Let streams pause before each module of a copy, too."""
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: self._delay())

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
    answers = exchange([_can_be_cut(site, name) for name in names])
    for number, name in enumerate(names):
        if all(answer[number] for answer in answers):
            return name
    raise _NotTried("a loss without any one of the first units has no gradient")


def _can_be_cut(site: Site, name: str) -> bool:
    trainee = Trainee(site.subject.plain(_cutting(name)), site.subject, Way())
    try:
        trainee.step()
    except (RuntimeError, ValueError):
        return False
    return True


def _cutting(name: str) -> Preparation:
    return lambda model: model.get_submodule(name).register_forward_hook(
        lambda module, args, output: tree_map_only(Tensor, Tensor.detach, output)
    )


def _state_of(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return gradients, parameters and buffers: whole ones, or this rank's rows."""
    found: list[tuple[str, Tensor | None]] = []
    for name, param in model.named_parameters():
        found.append((name, None if param.grad is None else rows_of(param.grad).clone()))
        found.append((name, rows_of(param.detach()).clone()))
    return [*found, *((name, buffer.clone()) for name, buffer in model.named_buffers())]


def check_same_parameters(site: Site) -> None:
    """Check that all ranks have the same model, as ``fully_shard`` expects."""
    comparison = Comparison()
    params = dict(site.subject.model.named_parameters())
    kinds = exchange([(n, tuple(p.shape), str(p.dtype)) for n, p in params.items()])
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            different = [a for a, b in zip(kind, kinds[0], strict=False) if a != b]
            raise ValueError(
                f"verify got other parameters on rank {rank} than on rank 0, from "
                f"{(different or [*kind, *kinds[0]])[0]} on. Make the same model on all ranks."
            )
    for name, param in params.items():
        of_first = gather(param.detach().to(site.subject.device))[0]
        comparison.add(name, "the parameter", of_first, param.detach().to(of_first.device))
    comparison.conclude()
    found = comparison.difference
    if found is not None:
        raise ValueError(
            f"verify got different values of '{found.parameter}' on ranks 0 and {found.rank}. Set "
            "the same seed on all ranks before making the model."
        )


def check_first_loss(site: Site) -> None:
    """Run the unsharded model once, so that its own errors are raised unchanged."""
    subject = site.subject
    error: Exception | None = None
    try:
        trainee = Trainee(subject.plain(), subject, Way())
        _check_finite(trainee.step())
        _check_finite(
            (f"the gradient of '{n}'", p.grad) for n, p in trainee.model.named_parameters()
        )
    except Exception as raised:
        error = raised
    texts = exchange(None if error is None else f"{type(error).__name__}: {error}")
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback refers to this frame
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"verify: the unsharded model raised on rank {rank}: {text}")


def _check_finite(values: Iterable[tuple[str, Tensor | None]]) -> None:
    for name, value in values:
        if value is not None and not bool(value.isfinite().all()):
            raise ValueError(
                f"verify got a model with NaN or Inf in {name} without sharding, so nothing could "
                "be compared. Check the model, its batch and its dtype first."
            )
