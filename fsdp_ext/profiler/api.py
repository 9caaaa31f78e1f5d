"""``fsdp_ext.profile``: records what a step's communication cost."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from torch import nn

from fsdp_ext._util.files import write_text
from fsdp_ext.profiler.causes import (
    Exposure,
    Lateness,
    Setting,
    Slowdown,
    explain,
    slowdown,
    typical_seconds,
)
from fsdp_ext.profiler.merge import collect, compare_clocks, lateness
from fsdp_ext.profiler.recording import Iteration, read
from fsdp_ext.profiler.report import Row, Summary, document_of, rows_of, summarise, text_of
from fsdp_ext.sharding.agreement import exchange, has_peers


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
        from fsdp_ext.sharding.root import running_root

        self._root = running_root(model, "profile")
        unit = self._root.units[0]
        if not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"profile expects at least 1 iteration but got {iterations!r}")
        self._core = self._root.core
        self.kept = iterations
        self._ranks: dict[int, list[Iteration]] = {}
        self._explained: list[list[Exposure]] | None = None
        self._slowdown: tuple[Slowdown | None] | None = None  # once it is known
        self._depth = 0  # of the prefetch, in the steps
        self.late: dict[tuple[int, int], Lateness] = {}  # where ranks were merged
        self._members: dict[tuple[int, int], list[int]] = {}  # of buckets, by first and last
        self.rank = unit.mesh.get_local_rank()
        self.lost = 0
        self.names = [unit.name for unit in self._root.units]
        self.sizes = self._core.unsharded_bytes()
        trainable = [
            sum(param.sharded.numel() for param in each.params if param.requires_grad)
            for each in self._root.units
        ]
        # What makes units alike, as far as can be told.
        self._kinds = list(zip(self.sizes, trainable, strict=True))
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
        self._ranks, self._explained, self._slowdown, self.late = {}, None, None, {}
        self._core.keep_times(self.kept)
        self._note_buckets()
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
        self._note_buckets()  # the first step may have changed them
        self._depth = self._root.settings.prefetch
        iterations = read(raw, end)
        if not iterations:
            raise RuntimeError(
                "profile expects at least one whole step in its block but there was none; run "
                "forward and backward in it"
            )
        self._ranks = {self.rank: iterations}

    def _note_buckets(self) -> None:
        for bucket in self._core.buckets():
            members = bucket["units"]
            self._members[members[0], members[-1]] = members

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
        return self._ranks[self.rank]

    @property
    def ranks(self) -> dict[int, list[Iteration]]:
        """Steps of each rank of the mesh that is known: this one's alone, or all after merge()."""
        if not self._ranks:
            raise RuntimeError(
                "profile expects its with block to have ended, which reads the times"
            )
        return self._ranks

    def merge(self, timelines: bool = True) -> profile:
        """Find the slowest rank of each collective. All ranks of the mesh call this.

        Clocks of other hosts are compared over the process group, to some ten microseconds.

        Args:
            timelines: whether to bring all ranks' spans to every rank, too, for traces and JSON:
                some hundred bytes a span. With hundreds of ranks, leave them where they are. They
                are brought if any rank asks for it.

        Returns:
            This profile, whose reports now name the slowest rank of each collective.

        Raises:
            RuntimeError: if there are no other ranks, as with a simulated transport, or if they
                have recorded no step in common.
        """
        unit = self._root.units[0]
        if self.world_size > 1 and not has_peers(unit):
            raise RuntimeError(
                "merge expects ranks that are there but those of a simulated transport, or of a "
                "fake process group, are not; report this one alone"
            )
        timelines = any(exchange(unit, timelines))
        clocks = compare_clocks(self.iterations, unit)
        mine = [one for one in self.iterations if one.number in clocks.common]
        self._ranks, self._explained, self._slowdown = {self.rank: mine}, None, None
        self.late = lateness(mine, clocks, unit)
        if timelines:
            self._ranks = collect(mine, clocks, unit)
        return self

    def explain(self) -> list[list[Exposure]]:
        """Return what the compute stream waited for, and why, for each step."""
        if self._explained is None:
            self._explained = self._explain()
        return self._explained

    def _explain(self) -> list[list[Exposure]]:
        setting = Setting(
            depth=self._depth,
            on_gpu=self._on_gpu,
            typical=typical_seconds(self.iterations),
            late=self.late,
        )
        return [explain(iteration, setting) for iteration in self.iterations]

    def slowdown(self) -> Slowdown | None:
        """Return how much slower units compute beside communication; None: cannot be told."""
        if self._slowdown is None:
            self._slowdown = (slowdown(self.iterations, self._kinds),)
        return self._slowdown[0]

    # - Figures

    def summary(self) -> Summary:
        """Return the average step; its parts add up to it."""
        return summarise(self)

    def rows(self, by: str = "bucket") -> list[Row]:
        """Return what communication cost, in order of the units.

        Args:
            by: "bucket", which is what travels, or "unit": those of a bucket share its bytes and
                times by their parameters' bytes.

        Raises:
            ValueError: if ``by`` is neither.
        """
        return rows_of(self, by)

    def members(self, units: tuple[int, int]) -> list[int]:
        """Return the numbers of a bucket's units, by its first and last one."""
        return self._members.get(units, [units[0]])

    def name_of(self, units: tuple[int, int]) -> str:
        """Return how reports call a unit, or a bucket by its first and last unit."""
        first, last = units
        if first < 0:
            return "all units"
        return self.names[first] if first == last else f"{self.names[first]} to {self.names[last]}"

    # - Output

    def report(self, file: TextIO | None = None, by: str = "bucket") -> None:
        """Print, for each bucket, what its communication cost and why, and what mends it.

        Args:
            file: instead of standard output.
            by: a row a "bucket", which is what travels, or a "unit", as for :meth:`rows`.

        Raises:
            ValueError: if ``by`` is neither.
        """
        print(text_of(self, by), file=file or sys.stdout)

    def __str__(self) -> str:
        """Return the report."""
        return text_of(self, "bucket")

    def to_json(self, path: str | Path | None = None) -> str | None:
        """Return all figures and spans as JSON, or write them to ``path``, whole or not at all.

        Times are seconds; those of spans are of ``time.monotonic()`` on this rank's host.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        text = json.dumps(document_of(self), indent=1)
        if path is None:
            return text
        write_text(path, text + "\n")
        return None

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev: a process a rank, a row a lane.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        from fsdp_ext.profiler.timeline import trace

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
        from fsdp_ext.profiler.timeline import draw

        draw(self, Path(path), iteration)
