"""The parts that all faults share: the sharding system, models, and the check with a replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

OURS, FSDP2 = "ours", "FSDP2"
TRANSPORTS = ("shared_memory", "process_group")  # of ours; FSDP2 has gloo alone
RANKS = 2
DIM = 8
Run = Callable[[nn.Module, int, int], Tensor]  # returns the loss of a model, a step and a rank


class WrongNumbers(Exception):
    """A result differs from the unsharded model's."""


class Case:
    """A fault with one system, on this rank."""

    def __init__(
        self, system: str, transport: str, tell: Callable[[float], object] = float
    ) -> None:
        """Start the clock.

        Args:
            system: `OURS` or `FSDP2`.
            transport: the transport of ours.
            tell: is called with the time when the fault begins, in case the process crashes.
        """
        self.system = system
        self.transport = transport
        self.rank = dist.get_rank()
        self._tell = tell
        self.begin()

    def fully_shard(self, module: nn.Module, **settings: Any) -> Any:
        """Shard a module with this case's system.

        Args:
            module: becomes a unit.
            settings: keyword arguments that only fsdp_ext has.
        """
        if self.system == FSDP2:
            from torch.distributed.fsdp import fully_shard

            return fully_shard(module)
        import fsdp_ext

        return fsdp_ext.fully_shard(module, transport=self.transport, **settings)

    def shard(self, model: Any, **settings: Any) -> Any:
        """Shard each of `model.layers` by itself, then the rest of the model."""
        for layer in model.layers:
            self.fully_shard(layer, **settings)
        return self.fully_shard(model, **settings)

    def begin(self) -> None:
        """Start the clock: what comes next is the fault itself."""
        self.since = time.monotonic()
        self._tell(self.since)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and how to provoke it.

    Attributes:
        name: the action of the user or a rank.
        kind: the outcome without a remedy.
        provoke: runs on each rank, and returns if all results are right.
        transports: the transports of fsdp_ext with which the fault is provoked.
        quick: whether `--quick` has it.
        lost: ranks that are killed on purpose.
        not_fsdp2: why FSDP2 cannot have it; empty if it can.
        open: why fsdp_ext has no remedy for it; empty if it has one.
    """

    name: str
    kind: str
    provoke: Callable[[Case], None]
    transports: tuple[str, ...] = TRANSPORTS[:1]
    quick: bool = False
    lost: tuple[int, ...] = ()
    not_fsdp2: str = ""
    open: str = ""


# - Models


class Stack(nn.Module):
    """Three layers in units of their own, which run in a given order, and a head in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in order:
            x = F.gelu(self.layers[index](x))
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    """Return the inputs of a step, which differ from rank to rank."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def run_all(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of the whole model."""
    loss: Tensor = model(batch(step, rank)).square().sum()
    return loss


# - The check


def train(case: Case, model: Any, reference: nn.Module, run: Run = run_all, steps: int = 3) -> None:
    """Train a sharded model, and one replica with the batches of all ranks; compare each step.

    Raises:
        WrongNumbers: if parameters differ by more than rounding.
    """
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]
    for step in range(steps):
        backward(case, model, reference, run, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, reference, step)


def backward(case: Case, model: Any, reference: nn.Module, run: Run, step: int) -> None:
    """Run forward and backward of a sharded model and of its replica."""
    for rank in range(RANKS):
        (run(reference, step, rank) / RANKS).backward()
    run(model, step, case.rank).backward()


def compare(model: nn.Module, reference: nn.Module, step: int = 0) -> None:
    """Compare all parameters.

    Raises:
        WrongNumbers: if one differs by more than rounding. It names the first.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    # All are gathered before any is judged, so that no rank waits for one that has raised.
    found = [(name, whole(parameter)) for name, parameter in parameters]
    expected = [each for _, each in reference.named_parameters(remove_duplicate=False)]
    for (name, mine), wanted in zip(found, expected, strict=True):
        check(f"{name!r} after step {step}", mine, wanted)


def check(what: str, found: Tensor, expected: Tensor) -> None:
    """Compare a tensor with the unsharded model's.

    Raises:
        WrongNumbers: if they differ by more than rounding, or in dtype.
    """
    if found.dtype != expected.dtype:
        raise WrongNumbers(f"{what} is {found.dtype}, and unsharded it is {expected.dtype}")
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        largest = float((found - expected).abs().max())
        raise WrongNumbers(f"{what} is off by up to {largest:.1g}")


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, from all ranks if it is sharded."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
