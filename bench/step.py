"""A training step of a transformer: time, peak memory and host time of each system.

    python bench/step.py [--quick] [--json FILE]
    torchrun --nproc-per-node 2 bench/step.py [--quick] [--json FILE]

On one GPU 1.0 B parameters, bf16 computation, fp32 parameters and AdamW, world size 1 over NCCL:
each system is built, warmed up, timed and freed, in two rounds, and what is shown is the median
over both. "host" is how long the host takes to issue a step to an idle GPU.

On the host one rank has a small model, several have one of 21 M parameters and 64 tokens each,
fp32, AdamW, one thread a rank. All systems are there at once and take turns, step by step; the
slowest rank counts. "unsharded" trains each rank's replica by itself: what a step takes without any
communication, on a machine that is as busy. "kept gathered" does not reshard after forward.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Timing,
    arguments,
    as_microseconds,
    bind_to_core,
    leave_ranks,
    print_table,
    write_json,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt_model import GPT, GPTConfig
from systems import compute_dtype, keep_unsharded, shard

SYSTEMS = {"unsharded": "unsharded", "ours": "ours", "FSDP2": "fsdp2", "FSDP1": "fsdp1"}
KEPT = ", kept gathered"
# Of several ranks, besides: what each system is like at its fastest.
MORE = {f"ours{KEPT}": "ours", f"FSDP2{KEPT}": "fsdp2", "DDP": "ddp"}
LARGE = GPTConfig(vocabulary=50304, context=2048, dim=1792, layers=22, heads=14)
MEDIUM = GPTConfig(vocabulary=2048, context=64, dim=512, layers=6, heads=8)
SMALL = GPTConfig(vocabulary=256, context=64, dim=128, layers=4, heads=4)
WARMUP = 3


class Training:
    """One system's model and optimizer, and its step."""

    def __init__(self, name: str, config: GPTConfig, batch: int, device: torch.device) -> None:
        self.system = (SYSTEMS | MORE)[name]
        self.config = config
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = GPT(config)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if self.system != "unsharded":
            model = shard(self.system, model, self.dtype, device)
        if name.endswith(KEPT):
            keep_unsharded(self.system, model)
        self.model = model
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        self.tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)

    def step(self) -> torch.Tensor:
        """Run one; return the loss."""
        self.optimizer.zero_grad()
        mixed = self.system == "unsharded" and self.dtype != torch.float32
        context = torch.autocast(self.device.type, self.dtype) if mixed else None
        with context or compute_dtype(self.system, self.dtype, self.device):
            logits = self.model(self.tokens)
        loss = torch.nn.functional.cross_entropy(
            logits.float().view(-1, self.config.vocabulary), self.tokens.view(-1)
        )
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def timed_step(self) -> tuple[float, float, torch.Tensor]:
        """Return the seconds of a step, those until it is issued, and the loss."""
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = self.step()
        issued = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, issued - start, loss


def run_in_turns(trainings: dict[str, Training], steps: int) -> dict[str, dict[str, Any]]:
    """Time systems step by step, in turns; return seconds of each step and what it took."""
    for training in trainings.values():
        for _ in range(WARMUP):
            training.timed_step()
    taken: dict[str, list[tuple[float, float, torch.Tensor]]] = {name: [] for name in trainings}
    for _ in range(steps):
        for name, training in trainings.items():
            taken[name].append(training.timed_step())
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
            "peak_bytes": None,
        }
    return results


def run_on_host(
    names: list[str], config: GPTConfig, batch: int, steps: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return the results of all systems by name, and why others cannot run here."""
    device = torch.device("cpu")
    trainings = {}
    errors = {}
    for name in names:
        try:
            trainings[name] = Training(name, config, batch, device)
        except Exception as error:  # a peer that cannot run here is listed with its own error
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    results = run_in_turns(trainings, steps)
    return {name: [result] for name, result in results.items()}, errors


def run_on_gpu(
    names: list[str], config: GPTConfig, batch: int, steps: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """As `run_on_host`, but one system at a time, since memory has no room for all."""
    device = torch.device("cuda", torch.cuda.current_device())
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for _ in range(2):
        for name in names:
            if name in errors:
                continue
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                result = run_in_turns({name: Training(name, config, batch, device)}, steps)[name]
                result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
                results[name].append(result)
            except Exception as error:  # as above
                traceback.print_exc()
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            gc.collect()  # the system's tensors, before the next one's
            torch.cuda.empty_cache()
    return {name: found for name, found in results.items() if name not in errors}, errors


def make_rows(
    results: dict[str, list[dict[str, Any]]], errors: dict[str, str], names: list[str], units: int
) -> list[dict[str, Any]]:
    """Return a row for each system, in order."""
    rows: list[dict[str, Any]] = []
    medians = {
        name: statistics.median(s for result in found for s in result["seconds"])
        for name, found in results.items()
    }
    for name in names:
        if name in errors:
            rows.append({"system": name, "error": errors[name]})
            continue
        found = results[name]

        def ratio(peer: str, name: str = name) -> float | None:
            return medians[name] / medians[peer] if peer in medians else None

        rows.append(
            {
                "system": name,
                "ranks": dist.get_world_size(),
                "step_us": as_microseconds(Timing.of([s for r in found for s in r["seconds"]])),
                "host_us": as_microseconds(
                    Timing.of([s for r in found for s in r["host_seconds"]])
                ),
                "peak_bytes": found[-1]["peak_bytes"],
                "loss": found[-1]["loss"],
                "parameters": found[-1]["parameters"],
                "units": units,
                "of_unsharded": ratio("unsharded"),
                "of_fsdp2": ratio("FSDP2"),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = []
    for row in rows:
        if "error" in row:
            table.append([row["system"], row["error"], "", "", "", "", "", ""])
            continue
        peak = row["peak_bytes"]
        table.append(
            [
                row["system"],
                f"{row['step_us']['median'] / 1e3:,.1f}",
                f"{row['step_us']['low'] / 1e3:,.1f} to {row['step_us']['high'] / 1e3:,.1f}",
                f"{row['host_us']['median'] / 1e3:,.1f}",
                "" if peak is None else f"{peak / 2**30:.2f}",
                "" if row["of_unsharded"] is None else f"{row['of_unsharded']:.3f}",
                "" if row["of_fsdp2"] is None else f"{row['of_fsdp2']:.3f}",
                f"{row['loss']:.4f}",
            ]
        )
    header = ["system", "step ms", "quartiles", "host ms", "peak GiB", "of unsharded", "of FSDP2"]
    print_table([*header, "loss"], table)


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = arguments(__doc__, quick="a small model")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if "RANK" in os.environ:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            bind_to_core()
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    else:
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    if not on_gpu:
        torch.set_num_threads(1)
    names = list(SYSTEMS) if ranks == 1 else [*SYSTEMS, *MORE]
    if on_gpu:
        config, batch, steps = (SMALL, 4, 4) if args.quick else (LARGE, 4, 8)
        results, errors = run_on_gpu(names, config, batch, steps)
    else:
        quick = (SMALL, 4, 8)
        config, batch, steps = quick if args.quick or ranks == 1 else (MEDIUM, 1, 24)
        results, errors = run_on_host(names, config, batch, steps)
    rows = make_rows(results, errors, names, config.layers + 1)
    if dist.get_rank() == 0:
        millions = max(row.get("parameters", 0) for row in rows) / 1e6
        what = f"{millions:,.0f} M parameters, {batch} x {config.context} tokens a rank"
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {what}")
        show(rows)
        if args.json:
            write_json(args.json, "step", rows)
            print(f"wrote {args.json}")
    if "ours" in errors:
        raise SystemExit(f"ours failed: {errors['ours']}")
    if "RANK" in os.environ:
        leave_ranks()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
