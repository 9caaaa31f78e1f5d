"""``fsdp_ext.tune``: bucket size, prefetch and what stays unsharded, by measurement and model."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ext import _C
from fsdp_ext._util.tables import columns, size
from fsdp_ext.comm.costs import default_bucket_bytes
from fsdp_ext.planner.api import find_buckets, gather_by_of, predict_plan
from fsdp_ext.planner.sizes import memory_of
from fsdp_ext.planner.units import PlannedRoot, units_of_sharded
from fsdp_ext.sharding.agreement import OutOfMemory, exchange, together
from fsdp_ext.sharding.auto import remember
from fsdp_ext.sharding.root import Root, running_root
from fsdp_ext.sharding.settings import AUTO, Choice, Decision, Scope
from fsdp_ext.tuner.arguments import agreed_limit, check_arguments, check_state, units_of
from fsdp_ext.tuner.costs import WARMUP, Costs, Probes, measure_costs
from fsdp_ext.tuner.race import race
from fsdp_ext.tuner.trial import Trial, left_as_it_was, mean_of_output

# What the model of the schedule finds best is measured, the best few of it: so many settings, of
# which so many have buckets of a size of their own.
_SHORTLIST = 7
_SIZES = 4
_DEPTHS = (0, 1, 2, 3, 4)
# What is predicted to be so much slower than the best is not measured for its bucket size alone.
_UNSURE = 0.25
# A setting that takes more memory has to be so much faster.
_WORTH = 0.01
# Of the memory before, where nobody says how much there is.
_GROWTH = 1.25

_logger = logging.getLogger("fsdp_ext")


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
        considered: how many settings there were.
        too_large: how many of them take too much memory; of the others the model was asked.
        costs: what the model was told.
        simulated: whether the transport is, and so each time.
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
                f"{self.considered} settings were considered, {self.too_large} of which take too "
                f"much memory; the most promising ones and the one before were measured, "
                f"{len(self.measured)} in all",
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
    collectives take, asks a model of the schedule (:func:`planner.schedule.predict`) about all
    settings, measures the best few, and keeps the fastest. Of settings that take equally long the
    one with less memory is kept. That takes about 40 * (steps + 2) steps, 400 by default; the
    logger "fsdp_ext" says how far it is, at level INFO.

    All ranks call this together, and choose the same: under the least of their memory limits. What
    fails between collectives on one rank is raised on all of them, and a setting that one of them
    has no memory for is dropped. Where one rank alone runs out in the middle of a step, the others
    wait in its next collective until the timeout, as in training.

    Parameters, buffers, gradients of the batch and the state of random numbers are left as they
    were, for which a copy of the shards and buffers is held meanwhile. Parameters are put back even
    if hooks of the model run an optimizer in backward, but not the states of that optimizer.

    What was passed to ``fully_shard`` as a number stays as it is; None and "auto" are chosen. A
    model that is made later in this process with the same units, dtypes and ranks begins with what
    was chosen here where it has ``bucket_bytes="auto"`` or ``prefetch="auto"``; if both, and there
    was a memory limit here, the same units stay unsharded, too.

    Args:
        model: its root module, to which ``fully_shard`` was applied; without gradients.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of
            keywords; as large as in training.
        loss: makes a scalar of the model's output; by default the mean of its floating-point
            tensors.
        memory_limit: bytes that a rank may hold without activations (:func:`fsdp_ext.plan` shows
            what they are). Nothing that takes more is tried but the setting before. As far as it
            allows, units stay unsharded after forward where that is faster. Without it none does
            that would not have done so before, and what takes more than 1.25 times the memory of
            the setting before is not tried.
        optimizer_states: tensors of each parameter's size that the optimizer keeps; 2 for AdamW.
        steps: how many steps each measurement takes.
        verbose: print what was found, on the first rank.

    Raises:
        TypeError: if ``fully_shard`` was not applied to the model, an argument is of another type,
            or the loss is no tensor.
        ValueError: if parameters have gradients, gradients are not reduced, the model is not the
            root, no setting fits ``memory_limit``, a number is out of range or not the same on all
            ranks, or the loss is no scalar.
        RuntimeError: if another rank raised anything else, or memory ran out with the settings that
            there were.
    """
    units = units_of(model)
    with together(units[0], "tune", "its arguments"):
        check_arguments(loss, memory_limit, optimizer_states, steps)
        check_state(model, units)
    memory_limit = agreed_limit(units[0], memory_limit, optimizer_states, steps)
    trial = Trial(model, batch, loss or mean_of_output, units[0])
    with left_as_it_was(model, batch, units):
        trial.first_step()  # makes the root
        trial.first_step()  # and the buckets of the order of forward
        root = running_root(model, "tune")
        settings = _Settings(root)
        try:
            tuner = _Tuner(root, settings, trial.step, steps, optimizer_states)
            result = tuner.run(memory_limit)
        except BaseException:
            settings.restore()
            raise
    remember(
        root.units,
        root.lanes.transport,
        result.chosen.choice,
        memory_known=memory_limit is not None,
    )
    if verbose and units[0].mesh.get_local_rank() == 0:
        print(result, file=sys.stdout)
    return result


# - Settings


class _Settings:
    """What may be chosen for a root, and how that is done."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._was = root.decision
        asked = root.units[0].settings
        self.fixed_bucket = asked.bucket_bytes not in (None, AUTO)
        self.fixed_prefetch = asked.prefetch not in (None, AUTO)
        now = root.settings
        self.before = Choice(now.bucket_bytes[0], now.prefetch, now.kept)
        # The units below the root whose reshard_after_forward the user has not set.
        self.free = [
            number
            for number, unit in enumerate(root.units)
            if number > 0 and unit.settings.reshard_after_forward is None
        ]

    def apply(self, choice: Choice) -> None:
        """Run with ``choice`` from the next step on."""
        self._root.decide(choice, Scope.OPEN)

    def probe(self, bucket_bytes: int, prefetch: int) -> None:
        """Run with these settings, whatever the user has set."""
        self._root.decide(Choice(bucket_bytes, prefetch, self.before.kept), Scope.ALL)

    def restore(self) -> None:
        """Run as before."""
        self._root.restore_decision(self._was)

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


@dataclasses.dataclass(frozen=True)
class _Sized:
    """A choice, its buckets and slots, and the bytes that a rank takes."""

    choice: Choice
    found: _C.MemoryPlan
    memory: int


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
        # Held, since the planned root refers to it weakly.
        self._copy = units_of_sharded(root.module, root.units[0].mesh.size())
        self._planned = PlannedRoot(self._copy, root.link)
        self._layouts = [unit.layout_for(training=True) for unit in self._planned.units]
        self._gather_by = gather_by_of(root.lanes.transport, root.units[0].device.type)

    def run(self, memory_limit: int | None) -> Tuning:
        before = self._sized(self._settings.before)
        limit = round(_GROWTH * before.memory) if memory_limit is None else memory_limit
        fitting, too_large = self._fitting(limit, memory_limit is not None)
        self._say(
            f"{len(fitting)} settings fit {size(limit)}, {too_large} do not; measuring what "
            "units compute and collectives take"
        )
        # All ranks go on with what the first one has.
        costs = exchange(
            self._root.units[0],
            measure_costs(self._root, self._step, self._settings.probe, self._probes(limit)),
        )[0]
        shortlist = self._shortlist([self._predicted(one, costs) for one in fitting])
        self._say(f"measuring the {len(shortlist)} settings that are predicted to be fastest")
        measured, finalists = self._measure([*shortlist, self._predicted(before, costs)])
        own = next(one for one in measured if one.choice == before.choice)
        allowed = [one for one in finalists if one.memory <= limit]
        if not allowed:
            raise RuntimeError(
                f"tune expects room for one of {len(shortlist)} settings, activations included, "
                "but memory ran out with each; use a smaller batch or more ranks"
            )
        chosen = _best(allowed)
        self._settings.apply(chosen.choice)
        return Tuning(
            chosen=chosen,
            before=own,
            measured=tuple(sorted(measured, key=lambda one: one.measured or 0.0)),
            considered=len(fitting) + too_large,
            too_large=too_large,
            costs=costs,
            simulated=self._root.lanes.transport == "simulated",
        )

    def _say(self, what: str) -> None:
        if self._root.units[0].mesh.get_local_rank() == 0:
            _logger.info("tune: %s", what)

    def _fitting(self, limit: int, keeps_more: bool) -> tuple[list[_Sized], int]:
        """Return what takes no more than ``limit`` bytes, and how many do."""
        total = sum(bucket["gather_bytes"] for bucket in self._root.core.buckets())
        asked = [self._sized(one) for one in self._settings.candidates(total, keeps_more)]
        fitting = [one for one in asked if one.memory <= limit]
        if not fitting:
            least = min(asked, key=lambda one: one.memory)
            raise ValueError(
                f"tune expects a memory_limit of at least {least.memory:,} bytes, which "
                f"{least.choice} takes without activations, but got {limit:,}; use more "
                "ranks or smaller units"
            )
        return fitting, len(asked) - len(fitting)

    def _probes(self, limit: int) -> Probes:
        """Return what measures costs within ``limit`` bytes."""
        kept = self._settings.before.kept
        gathers = [layout.gather_bytes * layout.world_size for layout in self._layouts[1:]]
        largest = max(gathers, default=0)
        pair = min(map(sum, itertools.pairwise(gathers)), default=0)
        alone = len(self._sized(Choice(0, 0, kept), Scope.ALL).found["buckets"])
        merged = None
        for nbytes in (3 * largest, 2 * largest, pair):
            sized = self._sized(Choice(nbytes, 0, kept), Scope.ALL)
            if sized.memory <= limit and len(sized.found["buckets"]) < alone:
                merged = nbytes
                break
        ahead = self._sized(Choice(0, 1, kept), Scope.ALL).memory <= limit
        return Probes(self._steps, merged, ahead)

    def _sized(self, choice: Choice, scope: Scope = Scope.OPEN) -> _Sized:
        """Return what ``choice`` takes."""
        planned, layouts = self._planned, self._layouts
        planned.decide(Decision(choice, scope))
        found = find_buckets(planned, layouts, self._gather_by, planned.most_ahead())
        memory = memory_of(planned, layouts, found, self._optimizer_states).peak
        return _Sized(choice, found, memory)

    def _predicted(self, sized: _Sized, costs: Costs) -> Candidate:
        self._planned.decide(Decision(sized.choice, Scope.OPEN))
        depth = self._planned.most_ahead()
        seconds = list(costs.compute)
        seconds[0] = (seconds[0][0] + costs.between, seconds[0][1])
        prediction = predict_plan(
            self._planned, sized.found, seconds, costs.link, depth, costs.contention, costs.copies
        )
        return Candidate(sized.choice, len(sized.found["buckets"]), sized.memory, prediction.step)

    def _shortlist(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the best few, of several bucket sizes.

        The model is off by a few percent, and hardly tells depths of prefetch apart. So there is
        one of each way to cut buckets first, as far as it may be the best, then others of these.
        """
        best = min(one.predicted for one in candidates)
        by_speed = sorted(
            candidates, key=lambda one: (round(one.predicted / best / _WORTH), one.memory)
        )
        alike: dict[tuple[int, int, int], Candidate] = {}
        for one in by_speed:
            alike.setdefault((one.buckets, one.choice.prefetch, len(one.choice.kept)), one)
        sizes: dict[int, Candidate] = {}
        for one in alike.values():
            if one.predicted <= best * (1 + _UNSURE):
                sizes.setdefault(one.buckets, one)
        first = list(sizes.values())[:_SIZES]
        others = [one for one in alike.values() if one not in first]
        return [*first, *others][:_SHORTLIST]

    def _measure(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Return them with what was measured, and of these the ones that may be the fastest.

        Those that some rank has no memory for are left out; the setting before has to fit.
        """
        unique = {one.choice: one for one in candidates}
        result = race(
            list(unique), self._run, self._on_slowest, self._settings.before, say=self._say
        )
        measured = {
            choice: dataclasses.replace(unique[choice], measured=seconds)
            for choice, seconds in result.medians.items()
        }
        return list(measured.values()), [measured[choice] for choice in result.finalists]

    def _on_slowest(self, taken: dict[Choice, list[float]]) -> dict[Choice, list[float]]:
        ranks = exchange(self._root.units[0], taken)
        return {
            choice: [max(of_step) for of_step in zip(*(of[choice] for of in ranks), strict=True)]
            for choice in taken
        }

    def _run(self, choice: Choice) -> list[float] | None:
        """Return the seconds of each step, which all ranks begin together.

        None: some rank has no memory for it.
        """
        taken: list[float] = []
        try:
            self._settings.apply(choice)
            for _ in range(WARMUP + self._steps):
                with together(self._root.units[0], "tune", f"a step with {choice}"):
                    taken.append(self._step())
        except OutOfMemory:
            if choice == self._settings.before:
                raise
            self._say(f"memory ran out with {choice}, which is dropped")
            if self._root.units[0].device.type == "cuda":
                torch.cuda.empty_cache()  # it holds buffers of other sizes now
            return None
        return taken[WARMUP:]


def _best(candidates: Sequence[Candidate]) -> Candidate:
    fastest = min(one.measured or 0.0 for one in candidates)
    as_fast = [one for one in candidates if (one.measured or 0.0) <= fastest * (1 + _WORTH)]
    return min(as_fast, key=lambda one: (one.memory, one.measured))
