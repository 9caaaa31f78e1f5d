"""``fsdp_ext.profile``: records the steps in its block and reports what communication cost."""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_ext import _C
from fsdp_ext._util.files import write_text
from fsdp_ext._util.numbers import MOST_STEPS, is_at_least
from fsdp_ext.comm.inline_group import refuse_inline
from fsdp_ext.profiler.causes import Exposure
from fsdp_ext.profiler.merge import collect, compare_clocks, lateness
from fsdp_ext.profiler.picture import draw
from fsdp_ext.profiler.recording import read_iterations
from fsdp_ext.profiler.report import document_of, text_of
from fsdp_ext.profiler.result import Recording
from fsdp_ext.profiler.rows import Row, Summary, rows_of, summarise
from fsdp_ext.profiler.trace import read_torch_trace, trace_of
from fsdp_ext.sharding.root.agreement import called_by_ranks_of, exchange, has_peers
from fsdp_ext.sharding.root.meshes import refuse_several_meshes
from fsdp_ext.sharding.root.root import Root, running_root
from fsdp_ext.sharding.root.unit import owners_of

# Roots that a profile is recording now.
_profiled: WeakSet[Root] = WeakSet()


def is_profiled(root: Root) -> bool:
    """Return whether a :class:`profile` is recording the root's model."""
    return root in _profiled


class profile(Recording):
    """Record when each collective was issued, began and ended, and which work waited for it.

        with fsdp_ext.profile(model) as prof:
            for batch in batches:
                train_step(batch)
        prof.report()

    Recording does not synchronise steps. The threads that do the work, or GPU events, record the
    times. The times are read when the block ends. Replays of a CUDA graph are not recorded. Steps
    of optimizers that have parameters of the model are recorded, too.

    Args:
        model: the root module, which has run forward before.
        iterations: how many of the last steps are kept.

    Raises:
        TypeError: if ``fully_shard`` was not applied to ``model``.
        RuntimeError: before the first forward.
        NotImplementedError: if the model is on several meshes, or its collectives run on the thread
            that trains.
        ValueError: if ``iterations`` is out of range.
    """

    def __init__(self, model: nn.Module, iterations: int = 64) -> None:
        self._root = running_root(model, "profile")
        refuse_inline(self._root.lanes.is_inline, "profile")
        refuse_several_meshes(self._root.units, "profile")
        if not is_at_least(iterations, 1, MOST_STEPS):
            raise ValueError(
                f"profile got iterations={iterations!r}. Keep from 1 to {MOST_STEPS} steps."
            )
        # Weak: a result must not keep the memory of units that the model no longer has.
        self._recorded = weakref.ref(self._root.impl)
        super().__init__(self._root, iterations)

    def __enter__(self) -> profile:
        """Begin to record; the next forward is the first in the recording."""
        if is_profiled(self._root):
            raise RuntimeError(
                "This model is already being profiled, since the block is inside another profile's "
                "block. Use the outer profile."
            )
        self._check_model()
        self._update(by_rank={}, late={}, lost=0)
        self._impl.keep_times(self.kept)
        self._note_buckets()
        self._owned = owners_of(self._root.units)
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        _profiled.add(self._root)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for all work that was issued, and read the times."""
        _profiled.discard(self._root)
        self._owned = {}
        for hook in self._hooks:
            hook.remove()
        if kind is not None:  # the block's own error says more
            if self._has_model():
                self._impl.keep_times(0)
            return
        self._check_model()
        end = time.monotonic()  # reading the times is no part of the last step
        raw, lost = self._impl.take_times()
        self._impl.keep_times(0)
        self._note_buckets()  # the first step may have changed them
        iterations = read_iterations(raw, end)
        if not iterations:
            raise RuntimeError(
                "profile recorded no whole step. Run forward and backward in its block."
            )
        self._update(
            by_rank={self.rank: iterations},
            lost=lost,
            prefetch_depth=self._root.settings.prefetch,
            wall_clock=_wall_clock(),
        )

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_model() and self._has_parameters_of(optimizer):
            self._impl.begin_step()

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_model() and self._has_parameters_of(optimizer):
            self._impl.end_step()

    @property
    def _impl(self) -> _C.TorchRoot:
        return self._root.impl

    def _has_model(self) -> bool:
        """Return whether the root still has the C++ side that the profile was made for."""
        return self._root.is_built and self._root.impl is self._recorded()

    def _check_model(self) -> None:
        if not self._has_model():
            raise RuntimeError(
                "profile lost track of the model, whose parameters were replaced, frozen or "
                "unfrozen. Run a forward, and then make another profile."
            )

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        return any(
            param in self._owned for group in optimizer.param_groups for param in group["params"]
        )

    def _note_buckets(self) -> None:
        self._impl.form_buckets()  # there may be none yet after parameters were replaced
        for bucket in self._impl.buckets():
            members = bucket["units"]
            self.buckets[members[0], members[-1]] = members

    # - Results of all ranks

    def merge(self, timelines: bool = True) -> profile:
        """Find the straggler of each collective. All ranks of the mesh call this.

        Clocks of different hosts are compared over the process group, to some ten microseconds.

        Args:
            timelines: also gather all ranks' spans on every rank, for traces, pictures and JSON. A
                span takes some hundred bytes, so pass False with hundreds of ranks. The spans are
                gathered if any rank asks for it.

        Returns:
            This profile. Its reports now name the straggler of each collective.

        Raises:
            RuntimeError: if there are no other ranks, as with a simulated transport, if a rank does
                not call it, or if no step was recorded on all ranks.
        """
        unit = self._root.units[0]
        if self.world_size > 1 and not has_peers(unit):
            raise RuntimeError(
                "merge needs the other ranks, but a simulated transport and a fake process group "
                "have none. Report this rank alone."
            )
        with called_by_ranks_of([unit], "merge", with_replicas=True):
            timelines = any(exchange(unit, timelines))
        clocks = compare_clocks(self.iterations, unit)
        mine = [one for one in self.iterations if one.number in clocks.common]
        late = lateness(mine, clocks, unit)
        ranks = collect(mine, clocks, unit) if timelines else {self.rank: mine}
        self._update(by_rank=ranks, late=late)
        return self

    # - Figures

    def explain(self) -> list[list[Exposure]]:
        """Return, for each step, the waits of the compute stream and their causes."""
        return self.exposures

    def summary(self) -> Summary:
        """Return the average step. Its parts add up to the whole."""
        return summarise(self)

    def rows(self, by: str = "bucket") -> list[Row]:
        """Return the cost of communication, in the order of the units.

        Args:
            by: "bucket" for a row per bucket, which is what travels together, or "unit" for a row
                per unit. Units share their bucket's bytes and times in proportion to the bytes of
                their parameters.

        Raises:
            ValueError: if ``by`` is neither.
        """
        return rows_of(self, by)

    # - Output

    def report(self, file: TextIO | None = None, by: str = "bucket") -> str:
        """Print the cost of communication, the causes of exposure, and the remedies.

        Args:
            file: where this rank prints. By default only rank 0 prints, to standard output, so that
                all ranks may call this. The rank of a simulated transport prints, too.
            by: a row per "bucket" or per "unit", as for :meth:`rows`.

        Returns:
            This rank's report, printed or not.

        Raises:
            ValueError: if ``by`` is neither.
        """
        text = text_of(self, by)
        if file is not None or self.rank == 0 or not has_peers(self._root.units[0]):
            (file or sys.stdout).write(text + "\n")
        return text

    def __str__(self) -> str:
        """Return the report."""
        return text_of(self, "bucket")

    def to_json(self, path: str | Path | None = None) -> str | None:
        """Return all figures and spans as JSON, or write them to ``path``, whole or not at all.

        Times are seconds. Times of spans are ``time.monotonic()`` of this rank's host.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        text = json.dumps(document_of(self), indent=1)
        if path is None:
            return text
        write_text(path, text + "\n")
        return None

    def save_trace(
        self, path: str | os.PathLike[str], torch_trace: str | os.PathLike[str] | None = None
    ) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing. Each rank is a process.

        Args:
            path: the file to write.
            torch_trace: a trace that ``torch.profiler`` has written of the same steps of this rank,
                with ``export_chrome_trace``; its name may end in ".gz". The new trace has its
                events, too, on one time axis with the lanes.

        Raises:
            OSError: if ``path`` cannot be written, or ``torch_trace`` cannot be read.
            ValueError: if ``torch_trace`` is no such trace, or was recorded at another time.
        """
        beside = None if torch_trace is None else read_torch_trace(Path(torch_trace), self)
        write_text(Path(path), json.dumps(trace_of(self, beside)) + "\n")

    def plot(self, path: str | os.PathLike[str], iteration: int | None = None) -> None:
        """Draw one step: compute, collectives and waits.

        Args:
            path: the picture's file; its suffix, such as ".png" or ".svg", is its format.
            iteration: index of the step among the recorded ones; by default the step of median
                length.

        Raises:
            ImportError: if matplotlib is missing.
            ValueError: if there is no such step.
            OSError: if ``path`` cannot be written.
        """
        draw(self, Path(path), iteration)


def _wall_clock() -> int:
    """Return ``Recording.wall_clock``, of the try that another thread interrupted least."""
    readings = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]
