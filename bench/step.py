"""A training step of a transformer on one rank: time, peak memory and host time of each system.

    python bench/step.py [--quick] [--json FILE]

On a GPU 1.0 B parameters, bf16 computation, fp32 parameters and AdamW, world size 1 over NCCL;
without one, or with --quick, a small model. Each system is built, warmed up, timed and freed, in
two rounds, and what is shown is the median over both. "host" is how long the host takes to issue a
step to an idle GPU.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, arguments, as_microseconds, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt_model import GPT, GPTConfig
from systems import compute_dtype, shard

SYSTEMS = {"unsharded": "unsharded", "ours": "ours", "FSDP2": "fsdp2", "FSDP1": "fsdp1"}
LARGE = GPTConfig(vocabulary=50304, context=2048, dim=1792, layers=22, heads=14)
SMALL = GPTConfig(vocabulary=256, context=64, dim=128, layers=4, heads=4)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(
    system: str, config: GPTConfig, batch: int, device: torch.device, steps: int
) -> dict[str, Any]:
    """Build, warm up and time one system; return seconds of each step and what it took."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with torch.device(device):
        model: Any = GPT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mixed = system == "unsharded" and dtype != torch.float32
    context = torch.autocast(device.type, dtype) if mixed else None
    if system != "unsharded":
        model = shard(system, model, dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(config.vocabulary, (batch, config.context), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with context or compute_dtype(system, dtype, device):
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(
            logits.float().view(-1, config.vocabulary), tokens.view(-1)
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        step()
    synchronize(device)
    seconds, host_seconds = [], []
    loss = None
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        host_seconds.append(time.perf_counter() - start)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    assert loss is not None
    return {
        "seconds": seconds,
        "host_seconds": host_seconds,
        "loss": loss.item(),
        "parameters": parameters,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None,
    }


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = arguments(__doc__, quick="a small model")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    small = args.quick or device.type == "cpu"
    config, batch, steps = (SMALL, 4, 4) if small else (LARGE, 4, 8)
    if device.type == "cpu":
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows: dict[str, dict[str, Any]] = {}
    collected: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for _ in range(2):
        for name, system in SYSTEMS.items():
            if "error" in rows.get(name, {}):
                continue
            rows[name] = {"system": name}
            try:
                collected[name].append(run(system, config, batch, device, steps))
            except Exception as error:  # a peer that cannot run here is listed with its own error
                traceback.print_exc()
                rows[name]["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            gc.collect()  # the system's tensors, before the next one's
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for name, results in collected.items():
        if not results or "error" in rows[name]:
            continue
        rows[name] |= {
            "step_us": as_microseconds(Timing.of([s for r in results for s in r["seconds"]])),
            "host_us": as_microseconds(Timing.of([s for r in results for s in r["host_seconds"]])),
            "peak_bytes": results[-1]["peak_bytes"],
            "loss": results[-1]["loss"],
            "parameters": results[-1]["parameters"],
            "units": config.layers + 1,
        }
    best = rows["FSDP2"].get("step_us", {}).get("median")
    table = []
    for row in rows.values():
        if "error" in row:
            table.append([row["system"], row["error"], "", "", "", "", ""])
            continue
        peak = row["peak_bytes"]
        table.append(
            [
                row["system"],
                f"{row['step_us']['median'] / 1e3:,.1f}",
                f"{row['step_us']['low'] / 1e3:,.1f} to {row['step_us']['high'] / 1e3:,.1f}",
                f"{row['host_us']['median'] / 1e3:,.1f}",
                "" if peak is None else f"{peak / 2**30:.2f}",
                "" if best is None else f"{row['step_us']['median'] / best:.3f}",
                f"{row['loss']:.4f}",
            ]
        )
    millions = max(row.get("parameters", 0) for row in rows.values()) / 1e6
    print(f"one rank, {backend}, {millions:,.0f} M parameters, {batch} x {config.context} tokens")
    print_table(
        ["system", "step ms", "quartiles", "host ms", "peak GiB", "of FSDP2", "loss"], table
    )
    if args.json:
        write_json(args.json, "step", list(rows.values()))
        print(f"wrote {args.json}")
    dist.destroy_process_group()
    if "error" in rows["ours"]:
        raise SystemExit(f"ours failed: {rows['ours']['error']}")


if __name__ == "__main__":
    main()
