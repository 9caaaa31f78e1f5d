"""``Tuning``: the result of ``tune``, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_ext._util.tables import columns, sentence, size
from fsdp_ext.planner.times import StepCosts
from fsdp_ext.sharding.params.settings import Choice
from fsdp_ext.tuner.policies import LanePolicies

# A setting that needs more memory has to be faster by at least this share.
WORTH = 0.01


@dataclass(frozen=True)
class Candidate:
    """One setting, its predicted time and its measured time.

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
        too_large: number of those that need too much memory. The others were predicted.
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
        """Return the table, the measured costs, and the reason for the choice."""
        word = "simulated " if self.simulated else ""
        header = ["bucket_bytes", "prefetch", "stay unsharded", "buckets", "memory"]
        header += [f"predicted {word}ms", f"measured {word}ms", ""]
        rows = [self._cells(candidate) for candidate in self.measured]
        gain = self.before.measured / self.chosen.measured
        kept = self.chosen.choice == self.before.choice
        what = "nothing was faster" if kept else f"{gain:.2f} times as fast as before"
        return "\n".join(
            [
                *columns(header, rows, left=(0, len(header) - 1)),
                sentence(_costs_line(self.costs)),
                sentence(
                    f"{self.considered} settings were considered; {self.too_large} of them need "
                    f"too much memory. {len(self.measured)} were measured: the most promising ones "
                    "and the one before."
                ),
                sentence(
                    f"chosen: {self.chosen.choice}: {what}; the prediction is off by "
                    f"{self.chosen.predicted / self.chosen.measured - 1:+.0%}"
                ),
                *(sentence(str(lane)) for lane in self.policies),
            ]
        )

    def _cells(self, one: Candidate) -> list[str]:
        notes = {"chosen": self.chosen, "before": self.before}
        count = len(one.choice.stays_unsharded)
        return [
            f"{one.choice.bucket_bytes:,}",
            str(one.choice.prefetch),
            f"{count} unit{'' if count == 1 else 's'}",
            str(one.buckets),
            size(one.memory),
            f"{one.predicted * 1e3:.2f}",
            f"{one.measured * 1e3:.2f}",
            ", ".join(name for name, noted in notes.items() if noted == one),
        ]


def _costs_line(costs: StepCosts) -> str:
    (alpha, beta), (reduce_alpha, reduce_beta) = costs.link.costs()
    computed = sum(unit.forward + unit.backward for unit in costs.compute)
    sums = ""
    if costs.replica_link is not None:
        _, (sum_alpha, sum_beta) = costs.replica_link.costs()
        sums = f", all-reduces {sum_alpha * 1e6:.0f} us + 2 S / {sum_beta / 1e9:.2f} GB/s"
    return (
        f"compute {computed * 1e3:.1f} ms a step; gathers {alpha * 1e6:.0f} us "
        f"+ S / {beta / 1e9:.2f} GB/s, reductions {reduce_alpha * 1e6:.0f} us + S / "
        f"{reduce_beta / 1e9:.2f} GB/s{sums} ({costs.link.name})"
    )
