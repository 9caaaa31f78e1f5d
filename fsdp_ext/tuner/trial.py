"""Timed steps, races of settings in them, and a model that is restored afterwards."""

# Note [races]
# The speed of a machine changes from second to second by more than settings differ, so settings
# take turns. The first setting of a round finds other caches than the second, so the order is
# random in each round, and the same on all ranks.

from __future__ import annotations

import contextlib
import logging
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp_ext._util.losses import output_of
from fsdp_ext.sharding.params.settings import Choice, Decision
from fsdp_ext.sharding.root.agreement import OutOfMemory, exchange, together
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat.state_dict_hooks import reshard

WARMUP = 2
_ROUNDS = 6

_logger = logging.getLogger("fsdp_ext")


@dataclass
class Trial:
    """Forward and backward of a model on one batch."""

    model: nn.Module
    # A tensor, a tuple of arguments, or a mapping of keywords. Its tensors get no gradients.
    batch: Any
    loss: Callable[[Any], Tensor]  # makes a scalar of the output
    unit: Unit  # any unit of the model
    steps: int  # how many steps each measurement takes, after a few steps of warm-up

    def __post_init__(self) -> None:
        """Let backward put gradients of the batch elsewhere."""
        self.batch = tree_map_only(
            Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), self.batch
        )

    def step(self, guard: Callable[[str], Any] = contextlib.nullcontext) -> float:
        """Run forward and backward, each part in a ``guard`` of its name; return the seconds."""
        self._synchronize()
        start = time.perf_counter()
        try:
            with guard("forward"):
                output = output_of(self.model, self.batch)
            with guard("the loss"):
                scalar = self.loss(output)
            with guard("backward"):
                torch.autograd.backward(scalar)
                self._synchronize()
            return time.perf_counter() - start
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None

    def race(
        self, root: Root, choices: Iterable[Choice], needed: Collection[Choice]
    ) -> dict[Choice, float]:
        """Return each setting's median seconds on the slowest rank: Note [races].

        Settings that some rank has no memory for are left out. OutOfMemory if one is ``needed``.
        """
        taken: dict[Choice, list[float]] = {choice: [] for choice in choices}
        log = _logger.info if self.unit.ranks.rank_in_mesh == 0 else _logger.debug
        order = random.Random(0)
        for number in range(1, _ROUNDS + 1):
            log("tune: round %d of %d with %d settings", number, _ROUNDS, len(taken))
            for choice in order.sample(list(taken), len(taken)):
                try:
                    taken[choice] += self._run(root, choice)
                except OutOfMemory:
                    if choice in needed:
                        raise
                    del taken[choice]
                    log("tune: memory ran out with %s, which is dropped", choice)
                    if self.unit.device.type == "cuda":
                        torch.cuda.empty_cache()  # the cache holds buffers of other sizes
        ranks = exchange(self.unit, taken)
        return {
            choice: statistics.median(map(max, zip(*(of[choice] for of in ranks), strict=True)))
            for choice in taken
        }

    def _run(self, root: Root, choice: Choice) -> list[float]:
        """Return the seconds of each step. All ranks begin each step together."""
        root.decide(Decision(choice))
        seconds = []
        for _ in range(WARMUP + self.steps):
            with together(self.unit, "tune", f"a step with {choice}"):
                seconds.append(self.step())
        return seconds[WARMUP:]

    def _synchronize(self) -> None:
        if self.unit.device.type == "cuda":
            torch.cuda.synchronize(self.unit.device)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, units: list[Unit]) -> Iterator[None]:
    """At the end, restore torch's random state and the buffers, and reshard the units.

    The model's forward may change buffers in place, or replace them.
    """
    devices = [] if units[0].device.type == "cpu" else [units[0].device]
    # If one of the calls raises, the stack still makes the others.
    with torch.random.fork_rng(devices=devices), contextlib.ExitStack() as at_the_end:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                at_the_end.callback(module._buffers.__setitem__, name, buffer)
                if buffer is not None:
                    at_the_end.callback(buffer.detach().copy_, buffer.detach().clone())
        for unit in units:
            at_the_end.callback(reshard, unit)
        yield
