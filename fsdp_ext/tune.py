"""``fsdp_ext.tune``: bucket size, prefetch and what stays unsharded, by measurement and model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ext.auto import AUTO, Choice, remember
from fsdp_ext.buckets import default_bucket_bytes
from fsdp_ext.measured_costs import WARMUP, Costs, exchange, measure_costs
from fsdp_ext.plan import find_buckets, gather_by_of, predict_plan
from fsdp_ext.plan_sizes import memory_of
from fsdp_ext.plan_units import PlannedRoot, units_of_sharded
from fsdp_ext.root import Root, running_root
from fsdp_ext.tables import columns, size

# What the model of the schedule finds best is measured, the best few of it.
_SHORTLIST = 5
_ROUNDS = 5
_DEPTHS = (1, 2, 3, 4)
# A setting that takes more memory has to be so much faster.
_WORTH = 0.01


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run, what was predicted of it and what was measured.

    Args:
        choice: the settings.
        buckets: how many there are.
        memory: bytes of each rank without activations, as :func:`fsdp_ext.plan` counts them.
        predicted: seconds of forward and backward, by the model of the schedule.
        measured: median seconds, on the slowest rank; None where only the model was asked.
    """

    choice: Choice
    buckets: int
    memory: int
    predicted: float
    measured: float | None = None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What :func:`tune` has found; ``str`` of it is a table that says why.

    Args:
        chosen: which is in use now.
        before: how the model ran before.
        measured: all that were measured, the fastest first.
        considered: how many the model was asked about.
        too_large: how many of them did not fit the memory limit.
        costs: what the model was told.
    """

    chosen: Candidate
    before: Candidate
    measured: tuple[Candidate, ...]
    considered: int
    too_large: int
    costs: Costs
    simulated: bool

    def __str__(self) -> str:
        """Return the table, and why."""
        word = "simulated " if self.simulated else ""
        header = ["bucket_bytes", "prefetch", "kept unsharded", "buckets", "memory"]
        header += [f"predicted {word}ms", f"measured {word}ms", ""]
        rows = []
        for candidate in dict.fromkeys([*self.measured, self.before]):
            notes = ["chosen"] if candidate == self.chosen else []
            notes += ["before"] if candidate.choice == self.before.choice else []
            rows.append(_cells(candidate, ", ".join(notes)))
        link = self.costs.link
        (alpha, beta), (reduce_alpha, reduce_beta) = link.costs()
        compute = sum(map(sum, self.costs.compute)) + self.costs.between
        return "\n".join(
            [
                *columns(header, rows, left=(0, len(header) - 1)),
                f"compute {compute * 1e3:.1f} ms a step; gathers {alpha * 1e6:.0f} us + S / "
                f"{beta / 1e9:.2f} GB/s, reductions {reduce_alpha * 1e6:.0f} us + S / "
                f"{reduce_beta / 1e9:.2f} GB/s ({link.name}); compute loses "
                f"{self.costs.contention:.0%} of the time that they take beside it",
                f"{self.considered} settings were predicted, {self.too_large} of which did not fit "
                f"the memory limit; the best {len(self.measured)} were measured",
                self._why(),
            ]
        )

    def _why(self) -> str:
        chosen, before = self.chosen, self.before
        assert chosen.measured is not None
        assert before.measured is not None
        off = chosen.predicted / chosen.measured - 1
        gain = before.measured / chosen.measured
        what = (
            "nothing was faster than what there was"
            if chosen.choice == before.choice
            else f"{gain:.2f} times as fast as before"
        )
        return f"chosen: {chosen.choice}: {what}; the prediction is off by {off:+.0%}"


def _cells(candidate: Candidate, note: str) -> tuple[str, ...]:
    kept = len(candidate.choice.kept)
    measured = candidate.measured
    return (
        f"{candidate.choice.bucket_bytes:,}",
        str(candidate.choice.prefetch),
        f"{kept} unit{'' if kept == 1 else 's'}",
        str(candidate.buckets),
        size(candidate.memory),
        f"{candidate.predicted * 1e3:.2f}",
        "" if measured is None else f"{measured * 1e3:.2f}",
        note,
    )


def tune(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    memory_limit: int | None = None,
    optimizer_states: int = 2,
    steps: int = 8,
    verbose: bool = True,
) -> Tuning:
    """Choose bucket size, prefetch depth and which units stay unsharded after forward; apply them.

    Runs steps (forward and backward, no optimizer) to measure what each unit computes and what
    collectives take, asks a model of the schedule (:func:`fsdp_ext.schedule.predict`) about all
    settings, measures the best few, and keeps the fastest. Of settings that take equally long the
    one with less memory is kept. All ranks call this together, and choose the same. Parameters,
    buffers and the state of random numbers are left as they were.

    What was passed to ``fully_shard`` as a number stays as it is; None and "auto" are chosen. A
    model that is made later in this process with the same units and ranks, and with
    ``bucket_bytes="auto"`` and ``prefetch="auto"``, begins with what was chosen here.

    Args:
        model: its root module, to which ``fully_shard`` was applied; without gradients.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of
            keywords; as large as in training.
        loss: makes a scalar of the model's output; by default the mean of its floating-point
            tensors.
        memory_limit: bytes that a rank may hold without activations (:func:`fsdp_ext.plan` shows
            what they are). As far as it allows, units stay unsharded after forward where that is
            faster. Without it none does that would not have done so before.
        optimizer_states: tensors of each parameter's size that the optimizer keeps; 2 for AdamW.
        steps: how many steps each measurement takes.
        verbose: print what was found, on the first rank.

    Raises:
        TypeError: if ``fully_shard`` was not applied to the model.
        ValueError: if parameters have gradients, no setting fits ``memory_limit``, or a number is
            out of range.
    """
    if not isinstance(steps, int) or steps < 2:
        raise ValueError(f"tune expects at least 2 steps for each measurement but got {steps!r}")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError(
            "tune expects a model without gradients, since it runs backward, but some parameters "
            "have them; call optimizer.zero_grad() before"
        )
    step = functools.partial(_step, model, batch, loss or _mean)
    with _left_as_it_was(model):
        step()  # makes the root
        step()  # and the buckets of the order of forward
        root = running_root(model, "tune")
        settings = _Settings(root)
        tuner = _Tuner(root, settings, step, steps, optimizer_states)
        try:
            result = tuner.run(memory_limit)
        except BaseException:
            settings.apply(settings.before)
            raise
    remember(root, result.chosen.choice)
    if verbose and root.units[0].mesh.get_local_rank() == 0:
        print(result, file=sys.stdout)
    return result


# - A step


def _step(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor]) -> float:
    """Run forward and backward; return the seconds."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*(batch if isinstance(batch, tuple) else (batch,)))
    torch.autograd.backward(loss(output))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def _mean(output: Any) -> Tensor:
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


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Keep buffers (running statistics, say) and random numbers; drop gradients."""
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
            for parameter in model.parameters():
                parameter.grad = None


# - Settings


class _Settings:
    """What may be chosen for a root, and how that is done."""

    def __init__(self, root: Root) -> None:
        self._root = root
        first = root.units[0]
        self.fixed_bucket = first.bucket_bytes not in (None, AUTO)
        self.fixed_prefetch = first.prefetch not in (None, AUTO)
        kept = tuple(
            number
            for number, unit in enumerate(root.units)
            if number > 0 and not root.reshards(unit)
        )
        self.before = Choice(root.bucket_bytes(first), root.prefetch_depth, kept)
        # Whose reshard_after_forward the user has not set.
        self.free = [
            number
            for number, unit in enumerate(root.units)
            if number > 0 and unit.reshard_after_forward is None
        ]

    def apply(self, choice: Choice) -> None:
        """Run that way from the next step on."""
        self._root.apply_choice(choice)

    def candidates(self, total: int, keeps_more: bool) -> Iterator[Choice]:
        """Yield all that may be chosen.

        Args:
            total: bytes of all units' gathers.
            keeps_more: whether units may stay unsharded that did not before.
        """
        default = default_bucket_bytes(self._root.link)
        sizes = {0, default, self.before.bucket_bytes}
        largest = max(total, 1)
        while largest > 1:
            sizes.add(largest)
            largest //= 2
            if len(sizes) > 16:
                break
        depths = set(_DEPTHS) | {self.before.prefetch}
        kept: list[tuple[int, ...]] = [self.before.kept]
        if keeps_more:
            others = [number for number in self.free if number not in self.before.kept]
            count = 1
            while count <= len(others):
                kept.append(tuple(sorted({*self.before.kept, *others[-count:]})))
                count = count + 1 if count < 8 else count + max(1, len(others) // 8)
            if others:
                kept.append(tuple(sorted({*self.before.kept, *others})))
        for nbytes in sorted({self.before.bucket_bytes} if self.fixed_bucket else sizes):
            for depth in sorted({self.before.prefetch} if self.fixed_prefetch else depths):
                for units in dict.fromkeys(kept):
                    yield Choice(nbytes, depth, units)


# - The search


class _Tuner:
    """Measures costs, asks the model, measures the best."""

    def __init__(
        self,
        root: Root,
        settings: _Settings,
        step: Callable[[], float],
        steps: int,
        optimizer_states: int,
    ) -> None:
        self._root = root
        self._settings = settings
        self._step = step
        self._steps = steps
        self._optimizer_states = optimizer_states
        self._planned = PlannedRoot(
            units_of_sharded(root.module, root.units[0].mesh.size()), root.link
        )
        device = root.units[0].device.type
        self._gather_by = gather_by_of(root.lanes.transport, device)

    def run(self, memory_limit: int | None) -> Tuning:
        before = self._settings.before

        def run_with(bucket_bytes: int, prefetch: int) -> None:
            self._settings.apply(Choice(bucket_bytes, prefetch, before.kept))

        costs = measure_costs(self._root, self._step, run_with, self._steps)
        # All ranks go on with what the first one has.
        costs = exchange(self._root, costs)[0]
        total = sum(bucket["gather_bytes"] for bucket in self._root.core.buckets())
        asked = [
            self._predicted(choice, costs)
            for choice in self._settings.candidates(total, memory_limit is not None)
        ]
        fitting = [one for one in asked if memory_limit is None or one.memory <= memory_limit]
        if not fitting:
            least = min(asked, key=lambda one: one.memory)
            raise ValueError(
                f"tune expects a memory_limit of at least {least.memory:,} bytes, which "
                f"{least.choice} takes without activations, but got {memory_limit:,}; use more "
                "ranks or smaller units"
            )
        shortlist = self._shortlist(fitting)
        own = self._predicted(before, costs)
        measured = self._measure([*shortlist, own])
        own = next(one for one in measured if one.choice == before)
        allowed = [one for one in measured if memory_limit is None or one.memory <= memory_limit]
        chosen = _best(allowed)
        self._settings.apply(chosen.choice)
        return Tuning(
            chosen=chosen,
            before=own,
            measured=tuple(sorted(measured, key=lambda one: one.measured or 0.0)),
            considered=len(asked),
            too_large=len(asked) - len(fitting),
            costs=costs,
            simulated=self._root.lanes.transport == "simulated",
        )

    def _predicted(self, choice: Choice, costs: Costs) -> Candidate:
        planned = self._planned
        planned.units[0].bucket_bytes = choice.bucket_bytes
        for number, unit in enumerate(planned.units):
            if number > 0:
                unit.reshard_after_forward = number not in choice.kept
        depth = planned.most_ahead(choice.prefetch)
        found = find_buckets(planned, self._gather_by, depth)
        layouts = [unit._layout(training=True) for unit in planned.units]
        seconds = list(costs.compute)
        seconds[0] = (seconds[0][0] + costs.between, seconds[0][1])
        prediction = predict_plan(
            planned, found, seconds, costs.link, depth, costs.contention, costs.copies
        )
        memory = memory_of(planned, layouts, found, self._optimizer_states).peak
        return Candidate(choice, len(found["buckets"]), memory, prediction.step)

    def _shortlist(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the best few that differ in how many buckets, how deep or what is kept."""
        best = min(one.predicted for one in candidates)
        by_speed = sorted(
            candidates, key=lambda one: (round(one.predicted / best / _WORTH), one.memory)
        )
        result: dict[tuple[int, int, int], Candidate] = {}
        for one in by_speed:
            key = (one.buckets, one.choice.prefetch, len(one.choice.kept))
            result.setdefault(key, one)
        return list(result.values())[:_SHORTLIST]

    def _measure(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return them with what was measured, in several rounds of all."""
        taken: dict[Choice, list[float]] = {one.choice: [] for one in candidates}
        order = random.Random(0)  # the same on all ranks; what came before leaves caches behind
        for _ in range(_ROUNDS):
            for choice in order.sample(list(taken), len(taken)):
                self._settings.apply(choice)
                for _ in range(WARMUP):
                    self._step()
                for _ in range(self._steps):
                    exchange(self._root, None)  # all begin together
                    taken[choice].append(self._step())
        ranks = exchange(self._root, taken)
        seconds = {
            choice: statistics.median(max(of[choice][i] for of in ranks) for i in range(len(own)))
            for choice, own in taken.items()
        }
        unique = {one.choice: one for one in candidates}
        return [
            dataclasses.replace(one, measured=seconds[choice]) for choice, one in unique.items()
        ]


def _best(candidates: Sequence[Candidate]) -> Candidate:
    fastest = min(one.measured or 0.0 for one in candidates)
    as_fast = [one for one in candidates if (one.measured or 0.0) <= fastest * (1 + _WORTH)]
    return min(as_fast, key=lambda one: (one.memory, one.measured))
