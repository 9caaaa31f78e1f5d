"""``Tuning``: the result of ``tune``, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_ext._util.tables import columns, sentence, size
from fsdp_ext.planner.times import StepCosts
from fsdp_ext.sharding.params.settings import Choice
from fsdp_ext.tuner.policies import LanePolicies


@dataclass(frozen=True)
class Candidate:
    """One setting.

    Args:
        choice: the setting.
        buckets: its number of buckets.
        memory: bytes of each rank without activations, as :func:`fsdp_ext.plan` counts them.
        predicted: seconds of forward and backward, predicted by the model of the schedule.
        measured: median seconds on the slowest rank; NaN before it is measured.
    """

    choice: Choice
    buckets: int
    memory: int
    predicted: float
    measured: float = math.nan


@dataclass(frozen=True)
class Tuning:
    """The result of :func:`fsdp_ext.tune`; ``str`` of it is a table with an explanation.

    Args:
        chosen: the setting in use now.
        before: the setting that was in use before.
        measured: all settings that were measured, the fastest first.
        considered: number of settings that were considered.
        too_large: number of those that need too much memory.
        costs: the measured costs that predictions are made from.
        simulated: whether the transport, and with it each time, is simulated.
        policies: times of NCCL's policies on each lane. ``tune`` applies none of them.
    """

    chosen: Candidate
    before: Candidate
    measured: tuple[Candidate, ...]
    considered: int
    too_large: int
    costs: StepCosts
    simulated: bool
    policies: tuple[LanePolicies, ...] = ()

    def __str__(self) -> str:
        """Return the table, and the reason for the choice."""
        word = "simulated " if self.simulated else ""
        header = ["setting", "buckets", "memory", f"predicted {word}ms", f"measured {word}ms", ""]
        names = {"chosen": self.chosen, "before": self.before}
        rows = [
            [
                str(one.choice),
                str(one.buckets),
                size(one.memory),
                f"{one.predicted * 1e3:.2f}",
                f"{one.measured * 1e3:.2f}",
                ", ".join(name for name, noted in names.items() if noted == one),
            ]
            for one in self.measured
        ]
        kept = self.chosen == self.before
        gain = f"{self.before.measured / self.chosen.measured:.2f} times as fast as before"
        summary = (
            f"{self.considered} settings were considered, {self.too_large} need too much memory; "
            f"chosen: {self.chosen.choice}: {'nothing was faster' if kept else gain}"
        )
        notes = (sentence(note) for note in (summary, *map(str, self.policies)))
        return "\n".join([*columns(header, rows, left=(0, len(header) - 1)), *notes])
