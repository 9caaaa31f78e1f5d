"""The search of ``tune``: measure costs, predict all settings, and race the best few."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_ext import _C
from fsdp_ext._util.tables import size
from fsdp_ext.planner.sizes import find_buckets, memory_of
from fsdp_ext.planner.times import StepCosts, predict_plan
from fsdp_ext.planner.units import PlannedRanks, PlannedRoot, units_of_sharded
from fsdp_ext.sharding.agreement import OutOfMemory, exchange, together
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.settings import Choice, Decision, Scope
from fsdp_ext.tuner.candidates import TunableSettings
from fsdp_ext.tuner.costs import WARMUP, Costs, Probes, measure_costs
from fsdp_ext.tuner.race import race
from fsdp_ext.tuner.result import Candidate, Tuning

# How many settings are measured, and how many of them are chosen for their bucket size.
_SHORTLIST = 7
_SIZES = 4
# A setting that is predicted to be slower than the best by more than this share is not measured for
# its bucket size alone.
_UNSURE = 0.25
# A setting that needs more memory has to be faster by at least this share.
_WORTH = 0.01
# Without a memory limit, settings may need this many times the memory of the one before.
_GROWTH = 1.25

_logger = logging.getLogger("fsdp_ext")


@dataclass(frozen=True)
class _Sized:
    """A choice with its buckets and slots, and the bytes that a rank needs."""

    choice: Choice
    found: _C.MemoryPlan
    memory: int


class Search:
    """Measures costs, predicts all settings, and measures the best few.

    Args:
        root: the root of the model.
        settings: the settings to choose from.
        step: runs forward and backward and returns the seconds.
        steps: how many steps each measurement takes.
        optimizer_states: tensors that the optimizer keeps per parameter.
    """

    def __init__(
        self,
        root: Root,
        settings: TunableSettings,
        step: Callable[[], float],
        steps: int,
        optimizer_states: int,
    ) -> None:
        self._root = root
        self._settings = settings
        self._step = step
        self._steps = steps
        self._optimizer_states = optimizer_states
        # The planned root refers to the copy weakly, so it is held here.
        first = root.units[0]
        self._copy = units_of_sharded(root.module, PlannedRanks(first.world_size, first.replicas))
        self._planned = PlannedRoot(self._copy, root.link)
        self._layouts = [unit.layout_for(training=True) for unit in self._planned.units]

    def run(self, memory_limit: int | None) -> Tuning:
        """Apply the best setting and return what was found.

        Args:
            memory_limit: bytes of each rank without activations, the same on all ranks.

        Raises:
            ValueError: if no setting fits ``memory_limit``.
            RuntimeError: if memory ran out with every setting that was measured.
        """
        before = self._sized(self._settings.before)
        limit = round(_GROWTH * before.memory) if memory_limit is None else memory_limit
        fitting, too_large = self._fitting(limit, memory_limit is not None)
        self._log(
            f"{len(fitting)} settings fit {size(limit)}, {too_large} do not; measuring the times "
            "of units and collectives"
        )
        # All ranks use the costs of the first one.
        costs = exchange(
            self._root.units[0],
            measure_costs(self._root, self._step, self._settings.probe, self._probes(limit)),
        )[0]
        shortlist = self._shortlist([self._predicted(one, costs) for one in fitting])
        self._log(f"measuring the {len(shortlist)} settings with the fastest predictions")
        measured, finalists = self._measure([*shortlist, self._predicted(before, costs)])
        own = next(one for one in measured if one.choice == before.choice)
        allowed = [one for one in finalists if one.memory <= limit]
        if not allowed:
            raise RuntimeError(
                f"tune ran out of memory with each of {len(shortlist)} settings that fit without "
                "activations. Use a smaller batch or more ranks."
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
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
        )

    def _log(self, what: str) -> None:
        if self._root.units[0].ranks.rank_in_mesh == 0:
            _logger.info("tune: %s", what)

    def _fitting(self, limit: int, keeps_more: bool) -> tuple[list[_Sized], int]:
        """Return the settings that need at most ``limit`` bytes, and the number of the others."""
        total = sum(bucket["gather_bytes"] for bucket in self._root.core.buckets())
        asked = [self._sized(one) for one in self._settings.candidates(total, keeps_more)]
        fitting = [one for one in asked if one.memory <= limit]
        if not fitting:
            least = min(asked, key=lambda one: one.memory)
            raise ValueError(
                f"tune found no setting within {limit:,} bytes. Pass a memory_limit of at least "
                f"{least.memory:,} bytes, which {least.choice} needs without activations, or use "
                "more ranks or smaller units."
            )
        return fitting, len(asked) - len(fitting)

    def _probes(self, limit: int) -> Probes:
        """Return the ways to measure costs that need at most ``limit`` bytes."""
        stays = self._settings.before.stays_unsharded
        gathers = [layout.gather_bytes * layout.world_size for layout in self._layouts[1:]]
        largest = max(gathers, default=0)
        pair = min(map(sum, itertools.pairwise(gathers)), default=0)
        alone = len(self._sized(Choice(0, 0, stays), Scope.ALL).found["buckets"])
        merged = None
        for nbytes in (3 * largest, 2 * largest, pair):
            sized = self._sized(Choice(nbytes, 0, stays), Scope.ALL)
            if sized.memory <= limit and len(sized.found["buckets"]) < alone:
                merged = nbytes
                break
        ahead = self._sized(Choice(0, 1, stays), Scope.ALL).memory <= limit
        return Probes(self._steps, merged, ahead)

    def _sized(self, choice: Choice, scope: Scope = Scope.OPEN) -> _Sized:
        """Return the buckets and the memory of ``choice``."""
        planned, layouts = self._planned, self._layouts
        planned.decide(Decision(choice, scope))
        device_type = self._root.units[0].device.type
        lanes = self._root.lanes
        transports = (lanes.transport, (self._root.replicas or lanes).transport)
        found = find_buckets(planned, layouts, transports, device_type)
        memory = memory_of(planned, layouts, found, self._optimizer_states).peak
        return _Sized(choice, found, memory)

    def _predicted(self, sized: _Sized, costs: Costs) -> Candidate:
        self._planned.decide(Decision(sized.choice, Scope.OPEN))
        compute = list(costs.compute)
        compute[0] = (compute[0][0] + costs.between, compute[0][1])
        prediction = predict_plan(
            self._planned,
            sized.found,
            StepCosts(compute, costs.link, costs.contention, costs.copies, costs.replica_link),
        )
        return Candidate(sized.choice, len(sized.found["buckets"]), sized.memory, prediction.step)

    def _shortlist(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the settings to measure: the best predictions, of several bucket sizes.

        Predictions are off by a few percent and hardly tell prefetch depths apart. So the list
        begins with the best setting of each number of buckets, if it may be the fastest of all.
        The best of the others follow.
        """
        best = min(one.predicted for one in candidates)
        by_speed = sorted(
            candidates, key=lambda one: (round(one.predicted / best / _WORTH), one.memory)
        )
        alike: dict[tuple[int, int, int], Candidate] = {}
        for one in by_speed:
            stays = len(one.choice.stays_unsharded)
            alike.setdefault((one.buckets, one.choice.prefetch, stays), one)
        sizes: dict[int, Candidate] = {}
        for one in alike.values():
            if one.predicted <= best * (1 + _UNSURE):
                sizes.setdefault(one.buckets, one)
        first = list(sizes.values())[:_SIZES]
        others = [one for one in alike.values() if one not in first]
        return [*first, *others][:_SHORTLIST]

    def _measure(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Return the candidates with their measured times, and the finalists among them.

        Candidates that run out of memory on some rank are left out. The setting before has to fit.
        """
        unique = {one.choice: one for one in candidates}
        result = race(
            list(unique), self._run, self._on_slowest, self._settings.before, log=self._log
        )
        measured = {
            choice: replace(unique[choice], measured=seconds, noise=result.noise[choice])
            for choice, seconds in result.medians.items()
        }
        return list(measured.values()), [measured[choice] for choice in result.finalists]

    def _on_slowest(self, taken: dict[Choice, list[float]]) -> dict[Choice, list[float]]:
        ranks = exchange(self._root.units[0], taken)
        return {
            choice: [max(seconds) for seconds in zip(*(of[choice] for of in ranks), strict=True)]
            for choice in taken
        }

    def _run(self, choice: Choice) -> list[float] | None:
        """Return the seconds of each step; None if some rank ran out of memory.

        All ranks begin each step together.
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
            self._log(f"memory ran out with {choice}, which is dropped")
            if self._root.units[0].device.type == "cuda":
                torch.cuda.empty_cache()  # the cache holds buffers of other sizes
            return None
        return taken[WARMUP:]


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the one with least memory among those that are as fast as the fastest."""
    fastest = min(one.measured or 0.0 for one in candidates)
    as_fast = [one for one in candidates if (one.measured or 0.0) <= fastest * (1 + _WORTH)]
    return min(as_fast, key=lambda one: (one.memory, one.measured))
