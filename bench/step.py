"""How long does a training step of a transformer take with each system, and how much memory?

One GPU (one rank over NCCL) trains 1.0 B parameters with bf16 computation, fp32 parameters and
AdamW. Each system is built, warmed up, timed and freed, in two rounds. The table shows the median
over both. "host ms" is the time that the host takes to issue a step to an idle GPU. "peak GiB" is
what torch's allocator had allocated at most. "device GiB" is by how much the driver's count of used
memory has grown after the steps. It also has what torch had reserved in vain, and NCCL's buffers,
registered ones among them.

On the CPU, one rank trains a small model. Several ranks (--ranks 2) train 21 M parameters with 64
tokens a rank, in fp32, with AdamW and one thread a rank. All systems are built at the same time and
take turns, step by step, in random order. The slowest rank counts. "unsharded" trains a replica on
each rank without any communication, on a machine that is as busy.

"transport" is what the ranks communicate over. "ours" uses shared memory between ranks of one host,
and "ours over gloo" uses the process group that the peers use. "kept gathered" does not reshard
after forward. All have PyTorch's AdamW; "ours, fsdp_ext.optim" has that of fsdp_ext. With --ranks 4
--replicas 2, all systems that shard do so within two shard groups of two ranks, and sum gradients
over these (hybrid sharding). "of best peer" is the time divided by that of the fastest system that
is not ours. "loss (off)" is the loss, and its difference to the loss of unsharded after as many
steps.
--compile measures unsharded, ours and FSDP2, each with and without torch.compile of its blocks; "of
eager" is then the time divided by the same system's without it, and "graphs" says how many graphs
Dynamo compiled, and how many of them after the second step. --offload does the same for
CPUOffloadPolicy, which on CPUs changes nothing for ours. Each peer has the best settings that its
documentation names, and "FSDP2, defaults" has none. A system that cannot run here is listed with
the first line of its error.
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

import fsdp_ext
from bench.harness import ranks
from bench.harness.options import UsageError, positive
from bench.harness.output import bars, picture, print_table
from bench.harness.runner import Keep
from bench.harness.timing import Timing, as_microseconds
from bench.models.training import (
    COMPILED,
    LARGE,
    MEDIUM,
    SMALL,
    STEPS_IN_ROUND,
    SYSTEMS,
    WARMUP,
    Build,
    GPTConfig,
    Training,
    compiled_systems,
    count_graphs,
    offloaded_systems,
    run_in_turns,
    systems_for,
)

RANKS = 1
RANKS_OF_ALL = (1, 2)
STEPS_THAT_COMPILE = 2  # graphs after these are recompilations
Results = dict[str, list[dict[str, Any]]]  # of each system, one result a round


class Case:
    """A model, and the systems that train it."""

    def __init__(
        self,
        builds: dict[str, Build],
        config: GPTConfig,
        batch: int,
        device: torch.device,
        replicas: int,
    ) -> None:
        self.builds = builds
        self.replicas = replicas
        self.config = config
        self.batch = batch
        self.device = device
        self.errors: dict[str, str] = {}
        self.transports: dict[str, str] = {}
        self.graphs: dict[str, int] = {}  # those that Dynamo compiled in the first two steps

    def start(self, name: str) -> Training | None:
        """Build and warm up a system; if a rank cannot, note the error and return None."""
        error = ""
        training = None
        try:
            training = Training(self.builds[name], self.config, self.batch, self.device)
            before = count_graphs()
            for step in range(WARMUP):
                training.timed_step()
                if step < STEPS_THAT_COMPILE:
                    self.graphs[name] = count_graphs() - before
        except Exception as raised:  # a peer that cannot run here is listed with its own error
            if name in SYSTEMS:
                traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        errors: list[Any] = [error]
        if dist.get_world_size() > 1:
            errors = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
        first = next(filter(None, errors), None)
        if first is None and training is not None:
            self.transports[name] = transport_of(training)
            return training
        self.errors[name] = str(first)
        return None

    def rows(self, results: Results) -> list[dict[str, Any]]:
        """Return a row for each system that has results or an error, in the order of the table."""
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
            late = sum(result["graphs"] for result in found)
            host = [s for result in found for s in result["host_seconds"]]
            rows.append(
                {
                    "system": name,
                    "settings": found[-1]["settings"],
                    "transport": self.transports[name],
                    "ranks": dist.get_world_size(),
                    "replicas": self.replicas,
                    "step_us": as_microseconds(Timing.of(seconds[name])),
                    "host_us": as_microseconds(Timing.of(host)),
                    "peak_bytes": found[-1]["peak_bytes"],
                    "device_bytes": found[-1]["device_bytes"],
                    "loss": losses[name],
                    "loss_off": losses[name] - losses.get("unsharded", losses[name]),
                    "parameters": found[-1]["parameters"],
                    "units": self.config.layers + 1,
                    "batch": self.batch,
                    "context": self.config.context,
                    "of_unsharded": ratio("unsharded"),
                    "of_fsdp2": ratio("FSDP2"),
                    "of_eager": ratio(name.removesuffix(COMPILED)),
                    "graphs": self.graphs[name],
                    "recompiled": late,
                    "of_best_peer": ratio(best),
                    "best_peer": best,
                }
            )
        return rows


def transport_of(training: Training) -> str:
    """Return the transport of the ranks, by its name in the table."""
    backend = "nccl" if training.device.type == "cuda" else "gloo"
    if isinstance(training.model, fsdp_ext.FSDPModule):
        used = fsdp_ext.profile(training.model).transport
        return f"{used} ({backend})" if used == "process_group" else used
    return backend if training.sharded.communicates else "none"


def run_on_host(case: Case, steps: int, keep: Keep) -> None:
    """Time all systems in turns; keep the rows after each round."""
    trainings = {name: case.start(name) for name in case.builds}
    running = {name: training for name, training in trainings.items() if training is not None}
    results: Results = {name: [] for name in running}
    order = random.Random(0)
    for _ in range(steps // STEPS_IN_ROUND):
        for name, result in run_in_turns(running, STEPS_IN_ROUND, order).items():
            results[name].append(result)
        keep.replace(case.rows(results))


def run_on_gpu(case: Case, steps: int, keep: Keep) -> None:
    """Do as `run_on_host`, but with one system at a time: memory has no room for all."""
    results: Results = {}
    for _ in range(2):
        for name in case.builds:
            if name in case.errors:
                continue
            torch.cuda.reset_peak_memory_stats()
            before, unused = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            training = case.start(name)
            if training is not None:
                result = run_in_turns({name: training}, steps, random.Random(0))[name]
                result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
                result["device_bytes"] = unused - torch.cuda.mem_get_info()[0]
                results.setdefault(name, []).append(result)
            del training
            gc.collect()  # frees the system's tensors before the next system is built
            torch.cuda.empty_cache()
            keep.replace(case.rows(results))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --peers, --compile, --offload and --replicas."""
    text = "also measure DeepSpeed, Megatron-FSDP and FairScale (make bench-peers installs them)"
    parser.add_argument("--peers", action="store_true", help=text)
    text = "measure unsharded, ours and FSDP2 with shards and gradients on the host, and without"
    parser.add_argument("--offload", action="store_true", help=text)
    text = (
        "measure unsharded, ours and FSDP2 with and without torch.compile of each block, by this "
    )
    text += "backend; default: inductor"
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help=text)
    text = "how many ranks have the same shard, for hybrid sharding; default: 1"
    parser.add_argument("--replicas", type=positive, metavar="N", default=1, help=text)


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure all systems that can run here."""
    device = ranks.join(args.device)
    replicas = args.replicas
    if dist.get_world_size() % replicas:
        raise UsageError(
            f"--replicas {replicas} does not divide the number of ranks, {dist.get_world_size()}"
        )
    if bool(args.compile) + args.offload + args.peers + (replicas > 1) > 1:
        raise UsageError(
            "--compile, --offload, --peers and --replicas exclude each other; pass one"
        )
    builds = systems_for(device, dist.get_world_size(), replicas)
    if args.compile:
        builds = compiled_systems(builds, args.compile)
    if args.offload:
        builds = offloaded_systems(builds)
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
    run(Case(builds, config, batch, device, replicas), steps, keep)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    ran = [row for row in rows if "error" not in row]
    if ran:
        first = ran[0]
        tokens = f"{first['batch']} x {first['context']} tokens a rank"
        print(f"{ranks_of(first)}, {first['parameters'] / 1e6:,.1f} M parameters, {tokens}")
        if first["ranks"] == 1 and first["peak_bytes"] is None:
            print(
                "One rank, the default, sends nothing, so this shows what sharding itself costs. "
                "Pass --ranks 2 to add communication."
            )
    is_compiled = any(row["system"].endswith(COMPILED) for row in rows)
    ratio_names = ["of_unsharded", "of_fsdp2", "of_eager" if is_compiled else "of_best_peer"]
    table = []
    for row in rows:
        if "error" in row:
            table.append([row["system"], *[""] * (10 + is_compiled), row["error"][:100]])
            continue
        ratios = [row[name] for name in ratio_names]
        table.append(
            [
                row["system"],
                row["transport"],
                f"{row['step_us']['median'] / 1e3:,.1f}",
                f"{row['step_us']['low'] / 1e3:,.1f} to {row['step_us']['high'] / 1e3:,.1f}",
                f"{row['host_us']['median'] / 1e3:,.1f}",
                *(
                    "" if row[name] is None else f"{row[name] / 2**30:.2f}"
                    for name in ("peak_bytes", "device_bytes")
                ),
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                f"{row['loss']:.4f} ({row['loss_off']:+.0e})",
                *([f"{row['graphs']}, {row['recompiled']} later"] if is_compiled else []),
                row["settings"],
            ]
        )
    header = ["system", "transport", "step ms", "quartiles", "host ms", "peak GiB", "device GiB"]
    header += [
        "of unsharded",
        "of FSDP2",
        "of eager" if is_compiled else "of best peer",
        "loss (off)",
    ]
    header += ["graphs"] * is_compiled + ["settings, or error"]
    print_table(header, table, words_last=True)


def ranks_of(row: dict[str, Any]) -> str:
    """Return the ranks in words."""
    count, replicas = row["ranks"], row["replicas"]
    groups = f" in {replicas} shard groups of {count // replicas}" if replicas > 1 else ""
    return f"{count} rank{'s' if count > 1 else ''}{groups}"


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: ours could not run."""
    failed = [row["error"] for row in rows if row["system"] == "ours" and "error" in row]
    return f"ours failed: {failed[0]}" if failed else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw each system's step as a bar."""
    ran = [row for row in rows if "error" not in row]
    title = f"a training step, {ran[0]['parameters'] / 1e6:,.1f} M parameters, {ranks_of(ran[0])}"
    with picture(path, title) as axes:
        steps = [row["step_us"]["median"] / 1e3 for row in ran]
        bars(axes, [row["system"] for row in ran], steps, "ms")
