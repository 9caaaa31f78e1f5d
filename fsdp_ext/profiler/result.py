"""The recording of one ``with`` block of ``profile``, and the explanation of its waits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp_ext.profiler.causes import Context, Exposure, Lateness, explain, typical_seconds
from fsdp_ext.profiler.recording import Iteration
from fsdp_ext.profiler.slowdown import Slowdown, slowdown


@dataclass(frozen=True)
class Recording:
    """The steps of one rank, of all ranks after a merge, and the names for reports.

    Args:
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
        members: numbers of each bucket's units, by the numbers of its first and last unit.
        ranks: iterations of each known rank, the oldest first.
        late: the straggler of each collective, by iteration number and place among its spans. It is
            empty until ranks are merged.
        replicas: how many ranks have the same shard.
        wall_clock: nanoseconds to add to ``time.monotonic_ns()`` of this rank's host to get
            ``time.time_ns()``, when the block ended.
    """

    names: list[str]
    sizes: list[int]
    kinds: Sequence[Hashable]
    transport: str
    is_simulated: bool
    rank: int
    world_size: int
    on_gpu: bool
    kept: int
    lost: int = 0
    prefetch_depth: int = 0
    members: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    ranks: dict[int, list[Iteration]] = field(default_factory=dict)
    late: Mapping[tuple[int, int], Lateness] = field(default_factory=dict)
    replicas: int = 1
    wall_clock: int = 0

    @property
    def iterations(self) -> list[Iteration]:
        """The steps of this rank."""
        return self.ranks[self.rank]

    @cached_property
    def exposures(self) -> list[list[Exposure]]:
        """The parts of all waits of the compute stream, by cause, for each step."""
        context = Context(
            depth=self.prefetch_depth,
            on_gpu=self.on_gpu,
            typical=typical_seconds(self.iterations),
            late=self.late,
        )
        return [explain(iteration, context) for iteration in self.iterations]

    @cached_property
    def slowdown(self) -> Slowdown | None:
        """How much slower units compute beside communication; None if that is unknown."""
        return slowdown(self.iterations, self.kinds)

    def units_of(self, bucket: tuple[int, int]) -> Sequence[int]:
        """Return the numbers of a bucket's units, given its first and its last one."""
        return self.members.get(bucket, [bucket[0]])

    def name_of(self, units: tuple[int, int]) -> str:
        """Return the name of a unit, or of a bucket given its first and its last unit."""
        first, last = units
        if first < 0:
            return "all units"
        return self.names[first] if first == last else f"{self.names[first]} to {self.names[last]}"
