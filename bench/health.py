"""What do checked steps and `fsdp_ext.health` add to a training step?

The model and the step are those of `python -m bench step`. "no checks" trains without check_every.
"not checked" has check_every, and none of the timed steps is checked. "checked" has check_every=1,
so all ranks hash and compare in every step. "health" calls `fsdp_ext.health` after every backward.

The models are built at the same time and take turns, step by step, in random order; the slowest
rank counts. "added" is the difference to the step without checks of the same turn: the median with
the quartiles. "of 100 steps" is what one checked step in a hundred, or one call of health, adds to
the time of a hundred steps; the aim is less than 1% for both together. A difference whose quartiles
include zero is shown as "not distinguishable from zero". The last line says how long
`fsdp_ext.verify` takes for the same model, once, before any training.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_ext
from bench.harness import ranks
from bench.harness.output import print_table
from bench.harness.runner import Keep
from bench.harness.timing import INDISTINCT, Timing, as_microseconds, includes_zero
from bench.models.training import (
    GPT,
    LARGE,
    MEDIUM,
    SMALL,
    STEPS_IN_ROUND,
    WARMUP,
    Block,
    GPTConfig,
    Sharded,
    Training,
    run_in_turns,
)

RANKS = 2
EVERY = 100  # the interval that the aim is for
AIM = 0.01
UNCHECKED = "no checks"
VERIFY = "verify"
# check_every of each system, and whether each step calls health.
SYSTEMS: dict[str, tuple[int | None, bool]] = {
    UNCHECKED: (None, False),
    "not checked": (10**9, False),
    "checked": (1, False),
    "health": (None, True),
}
OF_AIM = ("checked", "health")


def shard(
    model: GPT,
    dtype: torch.dtype,
    device: torch.device,
    *,
    every: int | None,
    calls_health: bool,
) -> Sharded:
    """Shard each block and the whole.

    Args:
        model: to shard.
        dtype: the dtype of the computation.
        device: this rank's device.
        every: every how many steps are checked.
        calls_health: whether to call `health` after each backward.
    """
    policy = fsdp_ext.MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fsdp_ext.fully_shard(block, mp_policy=policy)
    fsdp_ext.fully_shard(model, mp_policy=policy, check_every=every)

    def backward_and_health(loss: Tensor) -> None:
        loss.backward()
        found = fsdp_ext.health(model).first_nonfinite
        if found is not None:
            raise RuntimeError(f"the gradients of {found.name} are not finite")

    return Sharded(model, "", backward=backward_and_health if calls_health else Tensor.backward)


def rows_of(seconds: dict[str, list[float]], training: Training) -> list[dict[str, Any]]:
    """Return a row for each system.

    Args:
        seconds: the times of each step, by system. Values at the same place are of the same turn.
        training: any of the systems.
    """
    base = Timing.of(seconds[UNCHECKED])
    rows = []
    for name, (every, calls_health) in SYSTEMS.items():
        pairs = zip(seconds[name], seconds[UNCHECKED], strict=True)
        added = Timing.of([with_it - without for with_it, without in pairs])
        rows.append(
            {
                "system": name,
                "check_every": every,
                "calls_health": calls_health,
                "ranks": dist.get_world_size(),
                "parameters": training.parameters,
                "transport": fsdp_ext.profile(training.model).transport,
                "steps": len(seconds[name]),
                "step_us": as_microseconds(Timing.of(seconds[name])),
                "added_us": as_microseconds(added),
                "of_step": Timing.of(seconds[name]).median / base.median,
                "of_100_steps": added.median / (EVERY * base.median),
            }
        )
    return rows


def verify_row(config: GPTConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """Return how long `fsdp_ext.verify` takes, whose steps are of tokens like the training's.

    Raises:
        RuntimeError: if it finds a difference.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)
    dist.barrier()
    start = time.perf_counter()
    found = fsdp_ext.verify(model, tokens, units=Block, verbose=False)
    seconds = time.perf_counter() - start
    if not found.ok:
        raise RuntimeError(f"verify has found a difference:\n{found}")
    return {"system": VERIFY, "ranks": dist.get_world_size(), "seconds": seconds}


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure all systems in turns, and verify after them."""
    device = ranks.join(args.device)
    config: GPTConfig
    if args.quick:
        config, batch, rounds = SMALL, 4, 1
    elif device.type == "cuda":
        # A quarter of the layers of `step`: all systems are in memory at the same time.
        config, batch, rounds = dataclasses.replace(LARGE, layers=LARGE.layers // 4), 4, 4
    else:
        config, batch, rounds = MEDIUM, 1, 5
    trainings = {
        name: Training(
            partial(shard, every=every, calls_health=calls_health), config, batch, device
        )
        for name, (every, calls_health) in SYSTEMS.items()
    }
    for training in trainings.values():
        for _ in range(WARMUP):
            training.timed_step()
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for name, result in run_in_turns(trainings, STEPS_IN_ROUND, order).items():
            seconds[name] += result["seconds"]
        keep.replace(rows_of(seconds, trainings[UNCHECKED]))
    keep(verify_row(config, batch, device))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    verified = [row for row in rows if row["system"] == VERIFY]
    rows = [row for row in rows if row["system"] != VERIFY]
    first = rows[0]
    print(
        f"{first['ranks']} ranks over {first['transport']}, {first['parameters'] / 1e6:,.1f} M "
        f"parameters, {first['steps']} steps of each"
    )
    table = []
    for row in rows:
        step, added = row["step_us"], row["added_us"]
        cells = ["", ""]
        if row["system"] != UNCHECKED:
            figures = [added[name] / 1e3 for name in ("median", "low", "high")]
            cells = (
                [INDISTINCT, ""]
                if includes_zero(added)
                else [
                    f"{figures[0]:,.2f} ({figures[1]:,.2f} to {figures[2]:,.2f})",
                    f"{row['of_100_steps']:.2%}",
                ]
            )
        table.append(
            [
                row["system"],
                f"{step['median'] / 1e3:,.1f}",
                f"{step['low'] / 1e3:,.1f} to {step['high'] / 1e3:,.1f}",
                f"{row['of_step']:.3f}",
                *cells,
            ]
        )
    print_table(["", "step ms", "quartiles", "of no checks", "added ms", "of 100 steps"], table)
    both = sum(row["of_100_steps"] for row in rows if row["system"] in OF_AIM)
    print(
        f"one checked step and one call of health in {EVERY} steps add {both:.2%} (aim: {AIM:.0%})"
    )
    for row in verified:
        steps = row["seconds"] / (first["step_us"]["median"] / 1e6)
        print(f"verify takes {row['seconds']:,.1f} s once, as long as {steps:,.0f} steps")
