"""``fsdp_ext.profile``: what a step's communication cost, and why."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch import nn

from fsdp_ext.agreement import has_peers
from fsdp_ext.causes import (
    MEANING,
    PAUSE,
    REMEDY,
    Cause,
    Exposure,
    Lateness,
    Setting,
    Slowdown,
    explain,
    slowdown,
    typical_seconds,
)
from fsdp_ext.files import write_text
from fsdp_ext.ledger import WIRES, Iteration, read
from fsdp_ext.merge import collect, lateness
from fsdp_ext.tables import columns

# A report says how much slower compute is beside communication from here on.
_WORTH_SAYING = 1.05
# And what is exposed by causes of so much of it.
_WORTH_A_LINE = 0.01
_MS = 1e3

# A bucket by its first and last unit, an operation, a phase: what a row is of.
_Key = tuple[tuple[int, int], str, str]


@dataclass(frozen=True)
class Row:
    """What one bucket's collectives cost, on average over the steps.

    Args:
        units: names of the first and the last unit, or of the only one.
        operation: "gather" or "reduce".
        phase: in which it was issued: "forward", "backward" or "other".
        collectives: how many a step.
        nbytes: on the wire, of all ranks together.
        wire: seconds on the wire.
        hidden: of these, beside compute.
        exposed: seconds that the compute stream waited for it, also for what kept it waiting.
        causes: seconds of ``exposed`` by cause.
        slowest: the rank that came last most often, where ranks were merged; else None.
    """

    units: str
    operation: str
    phase: str
    collectives: float
    nbytes: float
    wire: float
    hidden: float
    exposed: float
    causes: dict[str, float]
    slowest: int | None = None


@dataclass(frozen=True)
class Summary:
    """A step on average, in seconds: step = compute + exposed + other.

    Args:
        iterations: how many steps were measured.
        step: from one forward's begin to the next one's.
        fastest: the shortest step.
        slowest: the longest one.
        compute: forward and backward without waits.
        exposed: waits for communication.
        other: what is neither: the loss, the optimizer, input.
        wire: time of all collectives.
        hidden: part of it that is not exposed, 0 to 1.
        causes: seconds of ``exposed`` by cause.
    """

    iterations: int
    step: float
    fastest: float
    slowest: float
    compute: float
    exposed: float
    other: float
    wire: float
    hidden: float
    causes: dict[str, float]


class profile:
    """Record when each collective of each unit was issued, began and ended, and what waited for it.

        with fsdp_ext.profile(model) as prof:
            for batch in batches:
                train_step(batch)
        prof.report()

    Steps are not synchronised: times are written down by the lanes' own threads, or are events of
    the GPU, and read when the block ends. What a CUDA graph replays is not recorded.

    Args:
        model: its root module, which has run forward.
        iterations: how many of the last steps are kept.

    Raises:
        TypeError: if ``fully_shard`` was not applied to it.
        RuntimeError: before the first forward.
        ValueError: if ``iterations`` is less than 1.
    """

    def __init__(self, model: nn.Module, iterations: int = 64) -> None:
        from fsdp_ext.root import running_root

        self._root = running_root(model, "profile")
        unit = self._root.units[0]
        if not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"profile expects at least 1 iteration but got {iterations!r}")
        self._core = self._root.core
        self._kept = iterations
        self._ranks: dict[int, list[Iteration]] = {}
        self._explained: list[list[Exposure]] | None = None
        self._late: dict[tuple[int, int], Lateness] = {}  # where ranks were merged
        self._rank = unit.mesh.get_local_rank()
        self.lost = 0
        self.names = [unit.name for unit in self._root.units]
        self.sizes = self._core.unsharded_bytes()
        self.transport = self._root.lanes.transport
        self.world_size = unit.mesh.size()
        self._on_gpu = unit.device.type == "cuda"

    def __enter__(self) -> profile:
        """Begin; the next forward is the first that is recorded."""
        if self._root.profiled_by is not None:
            raise RuntimeError(
                "profile expects to be the only one of its model but its block is within another "
                "one's; use that one"
            )
        self._ranks, self._explained, self._late = {}, None, {}
        self._core.keep_times(self._kept)
        self._root.profiled_by = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what was issued, and read the times."""
        self._root.profiled_by = None
        if kind is not None:
            self._core.keep_times(0)  # the block's own error says more
            return
        if self._root.core is not self._core:
            raise RuntimeError(
                "profile expects a model whose parameters stay but they were replaced, frozen or "
                "unfrozen meanwhile; profile the steps after that"
            )
        raw, self.lost = self._core.take_times()
        end = time.monotonic()
        self._core.keep_times(0)
        iterations = read(raw, end)
        if not iterations:
            raise RuntimeError(
                "profile expects at least one whole step in its block but there was none; run "
                "forward and backward in it"
            )
        self._ranks = {self._rank: iterations}

    # - What was recorded

    @property
    def iterations(self) -> list[Iteration]:
        """This rank's steps, the oldest first.

        Raises:
            RuntimeError: before the block has ended.
        """
        if not self._ranks:
            raise RuntimeError(
                "profile expects its with block to have ended, which reads the times"
            )
        return self._ranks[self._rank]

    @property
    def ranks(self) -> dict[int, list[Iteration]]:
        """Steps of each rank of the mesh that is known: this one's alone, or all after merge()."""
        if not self._ranks:
            raise RuntimeError(
                "profile expects its with block to have ended, which reads the times"
            )
        return self._ranks

    def merge(self) -> profile:
        """Bring all ranks' times together, on every rank. All ranks of the mesh call this.

        Clocks of other hosts are compared over the process group, to some ten microseconds.

        Returns:
            This profile, whose reports now name the slowest rank of each collective.

        Raises:
            RuntimeError: if there are no other ranks, as with a simulated transport.
        """
        unit = self._root.units[0]
        if self.world_size > 1 and not has_peers(unit):
            raise RuntimeError(
                "merge expects ranks that are there but those of a simulated transport, or of a "
                "fake process group, are not; report this one alone"
            )
        self._ranks, self._explained = collect(self.iterations, unit), None
        self._late = lateness(self._ranks, self._rank)
        return self

    def explain(self) -> list[list[Exposure]]:
        """Return what the compute stream waited for, and why, for each step."""
        if self._explained is None:
            self._explained = self._explain()
        return self._explained

    def _explain(self) -> list[list[Exposure]]:
        setting = Setting(
            depth=self._root.prefetch_depth,
            on_gpu=self._on_gpu,
            typical=typical_seconds(self.iterations),
            late=self._late,
        )
        return [explain(iteration, setting) for iteration in self.iterations]

    def slowdown(self) -> Slowdown | None:
        """Return how much slower units compute beside communication; None: cannot be told."""
        return slowdown(self.iterations, self.sizes)

    # - Figures

    def summary(self) -> Summary:
        """Return the average step; its parts add up to it."""
        iterations = self.iterations
        count = len(iterations)

        def mean(values: Sequence[float]) -> float:
            return sum(values) / count

        causes: defaultdict[str, float] = defaultdict(float)
        for exposures in self.explain():
            for exposure in exposures:
                causes[exposure.cause.value] += exposure.seconds / count
        steps = [iteration.step for iteration in iterations]
        wire = mean([iteration.wire for iteration in iterations])
        exposed = mean([iteration.exposed for iteration in iterations])
        return Summary(
            iterations=count,
            step=mean(steps),
            fastest=min(steps),
            slowest=max(steps),
            compute=mean([iteration.compute for iteration in iterations]),
            exposed=exposed,
            other=mean([iteration.other for iteration in iterations]),
            wire=wire,
            hidden=max(0.0, 1 - exposed / wire) if wire > 0 else 1.0,
            causes=dict(sorted(causes.items(), key=lambda item: -item[1])),
        )

    def rows(self) -> list[Row]:
        """Return what each bucket's collectives cost, in order of the units."""
        count = len(self.iterations)
        wire: defaultdict[_Key, list[float]] = defaultdict(list)
        nbytes: defaultdict[_Key, float] = defaultdict(float)
        slowest = self._slowest()
        for iteration in self.iterations:
            for span in iteration.of(*WIRES):
                key = (span.units, span.work, span.phase)
                wire[key].append(span.seconds)
                nbytes[key] += span.nbytes / count
        causes: defaultdict[_Key, dict[str, float]] = defaultdict(dict)
        for exposures in self.explain():
            for exposure in exposures:
                key = (exposure.units, exposure.operation, exposure.phase)
                of_key = causes[key]
                name = exposure.cause.value
                of_key[name] = of_key.get(name, 0.0) + exposure.seconds / count
        result = []
        order = {"forward": 0, "backward": 1, "other": 2}
        for key in sorted({*wire, *causes}, key=lambda k: (k[0], k[1], order[k[2]])):
            units, operation, phase = key
            exposed = sum(causes[key].values())
            on_wire = sum(wire[key]) / count
            result.append(
                Row(
                    units=self.name_of(units),
                    operation=operation,
                    phase=phase,
                    collectives=len(wire[key]) / count,
                    nbytes=nbytes[key],
                    wire=on_wire,
                    hidden=max(0.0, on_wire - exposed),
                    exposed=exposed,
                    causes=causes[key],
                    slowest=slowest.get((units, operation, phase)),
                )
            )
        return result

    def _slowest(self) -> dict[_Key, int]:
        """Return which rank came last most often, of those that came noticeably late."""
        votes: defaultdict[_Key, Counter[int]] = defaultdict(Counter)
        for iteration in self.iterations:
            for place, span in enumerate(iteration.spans):
                found = self._late.get((iteration.number, place))
                if found is not None and found.spread > PAUSE:
                    votes[span.units, span.work, span.phase][found.rank] += 1
        return {key: of.most_common(1)[0][0] for key, of in votes.items()}

    def name_of(self, units: tuple[int, int]) -> str:
        """Return how reports call a unit, or a bucket by its first and last unit."""
        first, last = units
        if first < 0:
            return "all units"
        return self.names[first] if first == last else f"{self.names[first]} to {self.names[last]}"

    # - Output

    def report(self, file: TextIO | None = None) -> None:
        """Print, for each bucket, what its communication cost and why, and what mends it.

        Args:
            file: instead of standard output.
        """
        print(self, file=file or sys.stdout)

    def __str__(self) -> str:
        """Return the report."""
        summary = self.summary()
        link = "a simulated link" if self.transport == "simulated" else self.transport
        lines = [
            f"{summary.iterations} steps on rank {self._rank} of {self.world_size} over {link}, on "
            "average",
            "",
            *columns(
                _HEADER, [_cells(row) for row in self.rows()], left=(0, 1, 2, len(_HEADER) - 1)
            ),
            "",
            f"step {_ms(summary.step)} ms ({_ms(summary.fastest)} to {_ms(summary.slowest)}) = "
            f"compute {_ms(summary.compute)} + exposed {_ms(summary.exposed)} + other "
            f"{_ms(summary.other)}; "
            + (
                f"wire {_ms(summary.wire)} ms, {summary.hidden:.0%} of it hidden"
                if summary.wire
                else "nothing was on a wire"
            ),
        ]
        if self.lost:
            lines.append(f"{self.lost} older steps were not kept (iterations={self._kept})")
        for name, seconds in summary.causes.items():
            cause = Cause(name)
            share = seconds / summary.exposed if summary.exposed else 0.0
            if share < _WORTH_A_LINE:
                continue
            lines.append(f"{_ms(seconds)} ms ({share:.0%}) {name}: {MEANING[cause]}")
            lines.append(f"    {REMEDY[cause]}")
        slow = self.slowdown()
        if slow is not None and slow.factor > _WORTH_SAYING:
            lines.append(
                f"{_ms(slow.seconds)} ms of compute, about: compute slowed by communication, which "
                f"takes {slow.factor:.2f} times as long beside it as alone"
            )
            lines.append(
                "    memory or cores are shared: fewer multiprocessors or threads for collectives, "
                "less to send"
            )
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> str | None:
        """Return all figures and spans as JSON, or write them to ``path``, whole or not at all.

        Times are seconds; those of spans are of ``time.monotonic()`` on this rank's host.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        slow = self.slowdown()
        document = {
            "transport": self.transport,
            "world_size": self.world_size,
            "rank": self._rank,
            "summary": asdict(self.summary()),
            "rows": [asdict(row) for row in self.rows()],
            "compute_slowed_by_communication": None if slow is None else asdict(slow),
            "iterations_lost": self.lost,
            "units": self.names,
            "ranks": {
                str(rank): [
                    {
                        "number": iteration.number,
                        "begin": iteration.begin,
                        "end": iteration.end,
                        "spans": [asdict(span) for span in iteration.spans],
                    }
                    for iteration in iterations
                ]
                for rank, iterations in self.ranks.items()
            },
        }
        text = json.dumps(document, indent=1)
        if path is None:
            return text
        write_text(path, text + "\n")
        return None

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev: a process a rank, a row a lane.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        from fsdp_ext.timeline import trace

        write_text(Path(path), json.dumps(trace(self)) + "\n")

    def plot(self, path: str | os.PathLike[str], iteration: int | None = None) -> None:
        """Draw one step: what computed, what was on the wire, what waited.

        Args:
            path: of the picture; its ending says what kind, ".png" or ".svg", say.
            iteration: which step, by its place; by default the one of median length.

        Raises:
            ImportError: if there is no matplotlib.
            OSError: if ``path`` cannot be written.
        """
        from fsdp_ext.timeline import draw

        draw(self, Path(path), iteration)


_HEADER = (
    "units",
    "operation",
    "phase",
    "wire MB",
    "wire ms",
    "hidden ms",
    "exposed ms",
    "because",
)


def _cells(row: Row) -> tuple[str, ...]:
    causes = sorted(row.causes.items(), key=lambda item: -item[1])
    because = ", ".join(
        name if seconds > 0.9 * row.exposed else f"{name} {_ms(seconds)}"
        for name, seconds in causes
        if seconds > 0.05 * row.exposed and seconds >= 5e-6
    )
    if row.slowest is not None:
        because += f"{'; ' if because else ''}rank {row.slowest} comes last"
    return (
        row.units,
        row.operation,
        row.phase,
        f"{row.nbytes / 1e6:.2f}",
        _ms(row.wire),
        _ms(row.hidden),
        _ms(row.exposed),
        because,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:.2f}"
