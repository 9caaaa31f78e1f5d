"""``Tuning``: what ``tune`` has found, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_ext._util.tables import columns, sentence, size
from fsdp_ext.sharding.settings import Choice
from fsdp_ext.tuner.costs import Costs

# A gain of fewer standard errors than this may be noise.
_DEVIATIONS = 2.0
# Predictions are usually closer than this.
_USUALLY_OFF = 0.25
# A load average above this, per core, is not from the training alone.
_LOADED = 1.5


@dataclass(frozen=True)
class Candidate:
    """One setting, its predicted time and its measured time.

    Args:
        choice: the setting.
        buckets: its number of buckets.
        memory: bytes of each rank without activations, as :func:`fsdp_ext.plan` counts them.
        predicted: seconds of forward and backward, predicted by the model of the schedule.
        measured: median seconds on the slowest rank; None if it was not measured.
        noise: standard error of ``measured`` in seconds; None if it was not measured.
    """

    choice: Choice
    buckets: int
    memory: int
    predicted: float
    measured: float | None = None
    noise: float | None = None


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
        load: the load average of this rank's host over the last minute, per core.
    """

    chosen: Candidate
    before: Candidate
    measured: tuple[Candidate, ...]
    considered: int
    too_large: int
    costs: Costs
    simulated: bool
    load: float = 0.0

    def __str__(self) -> str:
        """Return the table, the measured costs, and the reason for the choice."""
        return "\n".join(
            [
                *self._table(),
                sentence(_costs_line(self.costs)),
                sentence(
                    f"{self.considered} settings were considered; {self.too_large} of them need "
                    f"too much memory. {len(self.measured)} were measured: the most promising ones "
                    "and the one before."
                ),
                sentence(self._reason()),
            ]
        )

    def _table(self) -> list[str]:
        word = "simulated " if self.simulated else ""
        header = ["bucket_bytes", "prefetch", "stay unsharded", "buckets", "memory"]
        header += [f"predicted {word}ms", f"measured {word}ms", ""]
        rows = []
        for candidate in dict.fromkeys([*self.measured, self.before]):
            notes = ["chosen"] if candidate == self.chosen else []
            notes += ["before"] if candidate.choice == self.before.choice else []
            rows.append(_cells(candidate, ", ".join(notes)))
        return columns(header, rows, left=(0, len(header) - 1))

    def _reason(self) -> str:
        chosen, before = self.chosen, self.before
        assert chosen.measured is not None
        assert before.measured is not None
        off = chosen.predicted / chosen.measured - 1
        gain = before.measured / chosen.measured
        what = (
            "nothing was faster than before"
            if chosen.choice == before.choice
            else f"{gain:.2f} times as fast as before"
        )
        what += self._doubt()
        off_by = f"the prediction is off by {off:+.0%}"
        return f"chosen: {chosen.choice}: {what}; {off_by}{self._why_off(off)}"

    def _why_off(self, off: float) -> str:
        """Return why the prediction is off by so much; empty if that is usual."""
        if abs(off) < _USUALLY_OFF:
            return ""
        less = "longer" if off < 0 else "less time"
        why = f", since these steps took {less} than the costs that were measured for it"
        if self.load < _LOADED:
            return why
        return (
            f"{why}. The load average of this machine is {self.load:.1f} per core, so other "
            "programs disturb both measurements. Tune again on an idle machine."
        )

    def _doubt(self) -> str:
        """Return a remark if repeats differ by more than the gain; empty if they do not."""
        chosen, before = self.chosen, self.before
        if chosen.choice == before.choice or chosen.noise is None or before.noise is None:
            return ""
        assert chosen.measured is not None
        assert before.measured is not None
        noise = _DEVIATIONS * math.hypot(chosen.noise, before.noise)
        if before.measured - chosen.measured > noise:
            return ""
        return f", but repeats differ by {noise / before.measured:.1%}, so the gain may be noise"


def _cells(candidate: Candidate, note: str) -> tuple[str, ...]:
    count = len(candidate.choice.stays_unsharded)
    measured = candidate.measured
    return (
        f"{candidate.choice.bucket_bytes:,}",
        str(candidate.choice.prefetch),
        f"{count} unit{'' if count == 1 else 's'}",
        str(candidate.buckets),
        size(candidate.memory),
        f"{candidate.predicted * 1e3:.2f}",
        "" if measured is None else f"{measured * 1e3:.2f}",
        note,
    )


def _costs_line(costs: Costs) -> str:
    (alpha, beta), (reduce_alpha, reduce_beta) = costs.link.costs()
    compute = sum(map(sum, costs.compute)) + costs.between
    sums = ""
    if costs.replica_link is not None:
        _, (sum_alpha, sum_beta) = costs.replica_link.costs()
        sums = f", all-reduces {sum_alpha * 1e6:.0f} us + 2 S / {sum_beta / 1e9:.2f} GB/s"
    return (
        f"compute {compute * 1e3:.1f} ms a step; gathers {alpha * 1e6:.0f} us + S / "
        f"{beta / 1e9:.2f} GB/s, reductions {reduce_alpha * 1e6:.0f} us + S / "
        f"{reduce_beta / 1e9:.2f} GB/s{sums} ({costs.link.name}); beside a collective, compute "
        f"loses {costs.contention:.0%} of the collective's time"
    )
