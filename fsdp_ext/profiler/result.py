"""The recording of one ``with`` block of ``profile``, and the explanation of its waits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from fsdp_ext.profiler.causes import (
    Cause,
    Context,
    Exposure,
    Lateness,
    explain,
    typical_seconds,
)
from fsdp_ext.profiler.recording import Iteration
from fsdp_ext.profiler.slowdown import Slowdown, slowdown
from fsdp_ext.sharding.root.root import Root


class Recording:
    """The steps of one rank, of all ranks after a merge, and the names for reports.

    Attributes:
        names: names of the units, by number.
        sizes: bytes of each unit's unsharded parameters.
        kinds: a key for each unit. Units with equal keys are assumed to compute alike.
        transport: name of the transport.
        is_simulated: whether it is a simulated one.
        rank: this rank.
        world_size: number of ranks.
        on_gpu: whether the compute stream runs behind the host.
        kept: how many steps are kept at most.
        lost: how many older steps were dropped.
        prefetch_depth: depth of the prefetch in these steps.
        buckets: numbers of each bucket's units, by the numbers of its first and last unit.
        by_rank: iterations of each known rank, the oldest first; empty before the block has ended.
        late: the straggler of each collective, by iteration number and index among its spans. It is
            empty until ranks are merged.
        replicas: how many ranks have the same shard.
        wall_clock: nanoseconds to add to ``time.monotonic_ns()`` of this rank's host to get
            ``time.time_ns()``, when the block ended.
    """

    def __init__(self, root: Root, kept: int) -> None:
        units, first = root.units, root.units[0]
        self.names = [unit.name for unit in units]
        self.sizes = [root.impl.layout_of(number).unsharded_bytes for number in range(len(units))]
        trainable = [
            sum(param.sharded.numel() for param in unit.params if param.requires_grad)
            for unit in units
        ]
        self.kinds: Sequence[Hashable] = list(zip(self.sizes, trainable, strict=True))
        self.transport = root.lanes.transport
        self.is_simulated = root.lanes.is_simulated
        self.rank = first.ranks.rank_in_mesh
        self.world_size = first.ranks.world_size
        self.on_gpu = first.device.type == "cuda"
        self.kept = kept
        self.replicas = first.ranks.replicas
        self.lost = self.prefetch_depth = self.wall_clock = 0
        self.buckets: dict[tuple[int, int], Sequence[int]] = {}
        self.by_rank: dict[int, list[Iteration]] = {}
        self.late: Mapping[tuple[int, int], Lateness] = {}

    def _update(self, **changes: Any) -> None:
        """Set attributes, and forget the exposures that were computed from them."""
        vars(self).update(changes)
        vars(self).pop("exposures", None)

    @property
    def ranks(self) -> dict[int, list[Iteration]]:
        """The steps of each known rank: of this rank alone, or of all ranks after merge().

        Raises:
            RuntimeError: before the block has ended.
        """
        if not self.by_rank:
            raise RuntimeError(
                "profile has no times yet: it reads them when its with block ends. Leave the block "
                "first."
            )
        return self.by_rank

    @property
    def iterations(self) -> list[Iteration]:
        """This rank's steps, the oldest first.

        Raises:
            RuntimeError: before the block has ended.
        """
        return self.ranks[self.rank]

    @cached_property
    def exposures(self) -> list[list[Exposure]]:
        """The parts of all waits of the compute stream, by cause, for each step."""
        context = Context(
            depth=self.prefetch_depth,
            on_gpu=self.on_gpu,
            typical=typical_seconds(self.iterations),
            late=self.late,
            delayed=Cause.ISSUED_LATE if self.is_simulated else Cause.LATE_RANK,
        )
        by_number = {iteration.number: iteration for iteration in self.iterations}
        return [
            explain(iteration, context, by_number.get(iteration.number - 1))
            for iteration in self.iterations
        ]

    def slowdown(self) -> Slowdown | None:
        """Return how much slower units compute beside communication; None if that is unknown."""
        return slowdown(self.iterations, self.kinds)

    def name_of(self, units: tuple[int, int]) -> str:
        """Return the name of a unit, or of a bucket given its first and its last unit."""
        first, last = units
        if first < 0:
            return "all units"
        return self.names[first] if first == last else f"{self.names[first]} to {self.names[last]}"
