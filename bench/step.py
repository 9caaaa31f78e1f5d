"""What does a training step of a transformer take with each system: time, memory, host time?

On one GPU 1.0 B parameters, bf16 computation, fp32 parameters and AdamW, world size 1 over NCCL:
each system is built, warmed up, timed and freed, in two rounds, and what is shown is the median
over both. "host" is how long the host takes to issue a step to an idle GPU.

On the host one rank has a small model, several (--ranks 2) have one of 21 M parameters and 64
tokens each, fp32, AdamW, one thread a rank. All systems are there at once and take turns, step by
step and in random order; the slowest rank counts. "unsharded" trains each rank's replica by itself:
what a step takes without any communication, on a machine that is as busy. "kept gathered" does not
reshard after forward.

"of best peer" is the ratio of times to the fastest system that is not ours, "loss off" the
difference to the loss of unsharded after as many steps. Settings are the best that a system's
documentation names; "FSDP2, defaults" has none. A system that cannot run here is listed with the
first line of its own error.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import ranks
from bench.harness.output import bars, picture, print_table
from bench.harness.runner import Keep
from bench.harness.timing import Timing, as_microseconds
from bench.models.training import (
    LARGE,
    MEDIUM,
    MORE,
    SMALL,
    SYSTEMS,
    WARMUP,
    Build,
    GPTConfig,
    Training,
)

RANKS = 1
RANKS_OF_ALL = (1, 2)
STEPS_IN_ROUND = 8  # of each system, after which rows are kept
Results = dict[str, list[dict[str, Any]]]  # by system, of each round


class Case:
    """What is trained, and the systems that train it or say why not."""

    def __init__(
        self, builds: dict[str, Build], config: GPTConfig, batch: int, device: torch.device
    ) -> None:
        self.builds = builds
        self.config = config
        self.batch = batch
        self.device = device
        self.errors: dict[str, str] = {}

    def start(self, name: str) -> Training | None:
        """Build and warm up a system; None, and an error in the books, if a rank cannot."""
        error = ""
        training = None
        try:
            training = Training(self.builds[name], self.config, self.batch, self.device)
            for _ in range(WARMUP):
                training.timed_step()
        except Exception as raised:  # a peer that cannot run here is listed with its own error
            if name in SYSTEMS or name in MORE:
                traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        errors: list[Any] = [error]
        if dist.get_world_size() > 1:
            errors = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
        first = next(filter(None, errors), None)
        if first is None:
            return training
        self.errors[name] = first
        return None

    def rows(self, results: Results) -> list[dict[str, Any]]:
        """Return a row for each system that is in `results` or has failed, in order."""
        seconds = {
            name: [s for result in found for s in result["seconds"]]
            for name, found in results.items()
        }
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        peers = {name: m for name, m in medians.items() if not name.startswith(("ours", "unsh"))}
        best = min(peers, key=lambda name: peers[name], default="")
        losses = {name: found[-1]["loss"] for name, found in results.items()}
        rows: list[dict[str, Any]] = []
        for name in self.builds:
            if name in self.errors:
                rows.append({"system": name, "error": self.errors[name]})
            if name not in results:
                continue

            def ratio(peer: str, name: str = name) -> float | None:
                return medians[name] / medians[peer] if peer in medians else None

            found = results[name]
            host = [s for result in found for s in result["host_seconds"]]
            rows.append(
                {
                    "system": name,
                    "settings": found[-1]["settings"],
                    "ranks": dist.get_world_size(),
                    "step_us": as_microseconds(Timing.of(seconds[name])),
                    "host_us": as_microseconds(Timing.of(host)),
                    "peak_bytes": found[-1]["peak_bytes"],
                    "loss": losses[name],
                    "loss_off": losses[name] - losses.get("unsharded", losses[name]),
                    "parameters": found[-1]["parameters"],
                    "units": self.config.layers + 1,
                    "batch": self.batch,
                    "context": self.config.context,
                    "of_unsharded": ratio("unsharded"),
                    "of_fsdp2": ratio("FSDP2"),
                    "of_best_peer": ratio(best),
                    "best_peer": best,
                }
            )
        return rows


def run_in_turns(
    trainings: dict[str, Training], steps: int, order: random.Random
) -> dict[str, dict[str, Any]]:
    """Time systems step by step, in turns; return what each step took, by system.

    Args:
        trainings: the systems, the same on all ranks.
        steps: of each.
        order: of the turns; ranks that do not share its seed would wait for each other.
    """
    taken: dict[str, list[tuple[float, float, torch.Tensor]]] = {name: [] for name in trainings}
    for _ in range(steps):
        # What came before leaves caches and threads warm, or cold, so no order is kept.
        for name in order.sample(list(trainings), len(trainings)):
            taken[name].append(trainings[name].timed_step())
    results = {}
    for name, training in trainings.items():
        seconds = torch.tensor([(whole, host) for whole, host, _ in taken[name]]).double()
        if dist.get_world_size() > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        results[name] = {
            "seconds": seconds[:, 0].tolist(),
            "host_seconds": seconds[:, 1].tolist(),
            "loss": taken[name][-1][2].item(),
            "parameters": training.parameters,
            "settings": training.sharded.settings,
            "peak_bytes": None,
        }
    return results


def run_on_host(case: Case, steps: int, keep: Keep) -> None:
    """Time all systems in turns; keep rows after every few steps."""
    trainings = {name: case.start(name) for name in case.builds}
    running = {name: training for name, training in trainings.items() if training is not None}
    results: Results = {name: [] for name in running}
    order = random.Random(0)
    for _ in range(steps // STEPS_IN_ROUND):
        for name, result in run_in_turns(running, STEPS_IN_ROUND, order).items():
            results[name].append(result)
        keep.replace(case.rows(results))


def run_on_gpu(case: Case, steps: int, keep: Keep) -> None:
    """As `run_on_host`, but one system at a time, since memory has no room for all."""
    results: Results = {}
    for _ in range(2):
        for name in case.builds:
            if name in case.errors:
                continue
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            training = case.start(name)
            if training is not None:
                result = run_in_turns({name: training}, steps, random.Random(0))[name]
                result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
                results.setdefault(name, []).append(result)
            del training
            gc.collect()  # the system's tensors, before the next one's
            torch.cuda.empty_cache()
            keep.replace(case.rows(results))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add who else there is."""
    text = "also DeepSpeed, Megatron-FSDP and FairScale, which make bench-peers installs"
    parser.add_argument("--peers", action="store_true", help=text)


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure all systems that can run here."""
    device = ranks.join(args.device)
    builds = SYSTEMS if dist.get_world_size() == 1 else SYSTEMS | MORE
    if args.peers:
        from bench.models.peers import PEERS

        builds = builds | PEERS
    run: Callable[[Case, int, Keep], None]
    if device.type == "cuda":
        config, batch, steps = (SMALL, 4, 4) if args.quick else (LARGE, 4, 8)
        run = run_on_gpu
    elif args.quick or dist.get_world_size() == 1:
        config, batch, steps = SMALL, 4, STEPS_IN_ROUND
        run = run_on_host
    else:
        config, batch, steps = MEDIUM, 1, 3 * STEPS_IN_ROUND
        run = run_on_host
    run(Case(builds, config, batch, device), steps, keep)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and what each system was told."""
    ran = [row for row in rows if "error" not in row]
    if ran:
        first = ran[0]
        tokens = f"{first['batch']} x {first['context']} tokens a rank"
        count = f"{first['ranks']} rank{'s' if first['ranks'] > 1 else ''}"
        print(f"{count}, {first['parameters'] / 1e6:,.1f} M parameters, {tokens}")
    table = []
    for row in rows:
        if "error" in row:
            table.append([row["system"], *[""] * 8, row["error"][:100]])
            continue
        ratios = [row[name] for name in ("of_unsharded", "of_fsdp2", "of_best_peer")]
        table.append(
            [
                row["system"],
                f"{row['step_us']['median'] / 1e3:,.1f}",
                f"{row['step_us']['low'] / 1e3:,.1f} to {row['step_us']['high'] / 1e3:,.1f}",
                f"{row['host_us']['median'] / 1e3:,.1f}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                f"{row['loss']:.4f} ({row['loss_off']:+.0e})",
                row["settings"],
            ]
        )
    header = ["system", "step ms", "quartiles", "host ms", "peak GiB", "of unsharded", "of FSDP2"]
    print_table(
        [*header, "of best peer", "loss (off)", "settings, or error"], table, words_last=True
    )


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return what is said if ours could not run."""
    failed = [row["error"] for row in rows if row["system"] == "ours" and "error" in row]
    return f"ours failed: {failed[0]}" if failed else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw each system's step as a bar."""
    ran = [row for row in rows if "error" not in row]
    count = f"{ran[0]['ranks']} rank{'s' if ran[0]['ranks'] > 1 else ''}"
    title = f"a training step, {ran[0]['parameters'] / 1e6:,.1f} M parameters, {count}"
    with picture(path, title) as axes:
        steps = [row["step_us"]["median"] / 1e3 for row in ran]
        bars(axes, [row["system"] for row in ran], steps, "ms")
