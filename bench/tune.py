"""Are the settings that fsdp_ext.tune chooses as fast as the best of a full sweep?

Models of several shapes train over a simulated link in one process, over shared memory with
--ranks 2, or between two hosts with --hosts 2 --rate 4gbit (`python -m bench overlap --help`
describes the hosts). Simulated times are marked as such. fsdp_ext.tune chooses the bucket size and
the prefetch depth of a model. Then all settings of a sweep race as those of tune do: they run in
turns, in random order, and the median time of forward and backward on the slowest rank counts.

The fastest of many noisy medians is fast partly by chance. So the fastest few settings of the
sweep, its slowest one, the chosen one and the default run again, for longer. The table shows only
this second measurement. "of best" is chosen / the best of the fastest few. The goal is at most
1.03, that is, 3% slower. It can be less than 1 if the sweep does not have the chosen setting, or
has it under another name: two bucket sizes may give the same buckets. "default" is the setting
without tune.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ext
from bench.harness import ranks
from bench.harness.output import bars, picture, print_table
from bench.harness.runner import Keep
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.sharding.params.settings import Choice
from fsdp_ext.tuner.trial import Trial

RANKS = 1
HOSTS = 2
DEVICES = ("cpu",)
SIMULATED_RANKS = 64
DEPTHS = (0, 1, 2, 3)
BOUND = 1.03  # the goal of "of best"
FINALISTS = 3  # settings of the sweep that are measured again
STEPS, MORE_STEPS = 6, 24  # of each turn, in the sweep and in the second measurement


@dataclass(frozen=True)
class Case:
    """A stack of square layers, each a unit, over a link."""

    layers: int
    dim: int
    tokens: int
    link: Link

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.layers} x {self.dim**2 * 4 / 1e6:.2f} MB, {self.link.name}"

    def make(self, simulated: bool) -> tuple[Any, Tensor]:
        """Return the sharded model, which leaves its settings open, and a batch."""
        torch.manual_seed(0)
        transport = Simulated(SIMULATED_RANKS, self.link) if simulated else None
        layers = (nn.Linear(self.dim, self.dim, bias=False) for _ in range(self.layers))
        model: Any = nn.Sequential(*layers)
        for layer in model:
            fully_shard(layer, transport=transport)
        fully_shard(model, transport=transport)
        return model, torch.randn(self.tokens, self.dim)


CASES = [
    Case(64, 128, 64, Link("100 us, 4 GB/s", alpha=100e-6, beta=4e9)),
    Case(16, 512, 96, Link("20 us, 2 GB/s", alpha=20e-6, beta=2e9)),
    Case(24, 256, 128, Link("300 us, 2 GB/s", alpha=300e-6, beta=2e9)),
]


def settings(root: Any) -> list[Choice]:
    """Return the settings of the sweep: bucket sizes (halvings of the model, and 0) and depths."""
    total = sum(bucket["gather_bytes"] for bucket in root.impl.buckets())
    units = range(len(root.units))
    of_units = sum(root.impl.layout_of(number).unsharded_bytes for number in units)
    sizes = [0]
    while total > of_units // len(units):
        sizes.append(total)
        total //= 2
    return [Choice(nbytes, depth) for nbytes in sizes for depth in DEPTHS]


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Tune each model, then run the sweep."""
    warnings.filterwarnings("ignore", message="fsdp_ext: .*simulated")  # the tables say it
    simulated = not ranks.under_torchrun()
    if simulated:
        torch.set_num_threads(1)
    else:
        ranks.join(args.device)
    for rate in args.rate or [None]:
        if rate is not None:
            ranks.set_rate(rate)
        for case in CASES[:1] if args.quick else CASES:
            row = row_of(case, simulated, args.quick)
            keep(row if rate is None else {"rate": rate, **row})


def row_of(case: Case, simulated: bool, quick: bool) -> dict[str, Any]:
    """Tune one model and sweep its settings; return the row."""
    model, batch = case.make(simulated)
    tuned = fsdp_ext.tune(model, batch, steps=3 if quick else 8, verbose=False)
    chosen, default = tuned.chosen.choice, tuned.before.choice
    root = model._fsdp_ext_unit.root

    def race(choices: list[Choice], steps: int, *needed: Choice) -> dict[Choice, float]:
        trial = Trial(model, batch, torch.mean, root.units[0], 3 if quick else steps)
        return trial.race(root, dict.fromkeys(choices), needed)

    choices = settings(root)[1::4] if quick else settings(root)
    first = race(choices, STEPS)  # without settings that ran out of memory
    ordered = sorted(first, key=lambda choice: first[choice])
    finalists = ordered[:FINALISTS]
    of_table = [*finalists, ordered[-1], default, chosen]
    seconds = race(of_table, MORE_STEPS, *of_table)
    best = min(finalists, key=lambda choice: seconds[choice])
    word = "simulated_" if simulated else ""

    def as_rows(found: dict[Choice, float]) -> list[dict[str, Any]]:
        return [{"setting": str(choice), f"{word}ms": s * 1e3} for choice, s in found.items()]

    return {
        "model": case.name if simulated else case.name.partition(",")[0],
        "transport": root.lanes.transport,
        "ranks": SIMULATED_RANKS if simulated else dist.get_world_size(),
        "chosen": str(chosen),
        "best": str(best),
        "settings": len(choices),
        f"{word}chosen_ms": seconds[chosen] * 1e3,
        f"{word}predicted_ms": tuned.chosen.predicted * 1e3,
        f"{word}best_ms": seconds[best] * 1e3,
        f"{word}default_ms": seconds[default] * 1e3,
        f"{word}worst_ms": seconds[ordered[-1]] * 1e3,
        f"{word}of_best": seconds[chosen] / seconds[best],
        "sweep": as_rows(first),
        "finalists": as_rows(seconds),
    }


def figure(row: dict[str, Any], name: str) -> float:
    """Return a time or a ratio of a row, simulated or not."""
    value: float = row.get(name, row.get(f"simulated_{name}"))
    return value


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    simulated = any(row["transport"] == "simulated" for row in rows)
    print(
        f"\nforward and backward, {'simulated ' if simulated else ''}ms, over "
        f"{rows[0]['transport'] if rows else ''}"
    )
    names = ["chosen_ms", "predicted_ms", "best_ms", "default_ms", "worst_ms"]
    print_table(
        ["model", "chosen", "predicted", "best", "default", "worst", "of best", "settings"],
        [
            [
                ", ".join(filter(None, [row["model"], row.get("rate")])),
                *(f"{figure(row, name):.2f}" for name in names),
                f"{figure(row, 'of_best'):.3f}",
                f"{row['settings']}; chosen {row['chosen']}; best {row['best']}",
            ]
            for row in rows
        ],
        words_last=True,
    )
    if rows:
        print(within(rows))


def within(rows: list[dict[str, Any]]) -> str:
    """Return how many models are within the bound, and the worst one's distance from it."""
    kept = [row for row in rows if figure(row, "of_best") <= BOUND]
    worst = max(rows, key=lambda row: figure(row, "of_best"))
    off = figure(worst, "of_best") - 1
    word = " (simulated)" if worst["transport"] == "simulated" else ""
    return (
        f"{len(kept)} of {len(rows)} within {BOUND - 1:.0%} of the best{word}; the farthest is "
        f"{worst['model']}, {off:+.1%}, {abs(off - BOUND + 1) * 100:.1f} percentage points "
        f"{'inside' if off <= BOUND - 1 else 'outside'}"
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the chosen, the default and the worst setting relative to the best."""
    with picture(path, "step time relative to the best of a sweep", columns=len(rows)) as axes:
        for axis, row in zip(axes if len(rows) > 1 else [axes], rows, strict=True):
            names = ["chosen", "default", "worst"]
            best = figure(row, "best_ms")
            values = [figure(row, f"{name}_ms") / best for name in names]
            bars(axis, names, values, "of the best")
            axis.set_title(row["model"], fontsize=8)
