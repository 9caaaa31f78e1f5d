"""Compare a first step and the device's memory with CUDA_MODULE_LOADING=LAZY and EAGER.

    python tools/gpu_loading.py [--json FILE] [--quick]

CUDA reads the variable once, so each setting has a process of its own. It trains the transformer of
`bench step` on one rank, over NCCL. fsdp_ext loads its kernels when it shards. With LAZY, torch and
NCCL load theirs when they first use them. "outside" is the memory that the driver counts as used,
less what torch's allocator has reserved: the context, the code of kernels, and NCCL's buffers. It
is correct only if no other process uses the GPU. --quick trains a small model. Each row is written
when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = ("LAZY", "EAGER")
VARIABLE = "CUDA_MODULE_LOADING"
COLUMNS = ("context_s", "shard_s", "first_step_ms", "third_step_ms")
COLUMNS += ("outside_sharded_mib", "outside_mib", "reserved_mib")


def measure(*, quick: bool) -> dict[str, Any]:
    """Shard a model and train three steps; return the times and the memory."""
    import torch
    import torch.distributed as dist

    from bench.models.training import LARGE, SMALL, Training, shard_ours

    def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
        start = time.monotonic()
        result = work()
        torch.cuda.synchronize()
        return time.monotonic() - start, result

    def outside() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / 2**20

    device = torch.device("cuda", 0)
    context_s, _ = seconds(lambda: torch.zeros(1, device=device))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    config = SMALL if quick else LARGE
    shard_s, training = seconds(lambda: Training(shard_ours, config, 1, device))
    outside_sharded = outside()
    steps = [seconds(training.step)[0] for _ in range(3)]
    row = {
        "loading": os.environ[VARIABLE],
        "context_s": context_s,
        "shard_s": shard_s,
        "first_step_ms": 1e3 * steps[0],
        "third_step_ms": 1e3 * steps[2],
        "outside_sharded_mib": outside_sharded,
        "outside_mib": outside(),
        "reserved_mib": torch.cuda.memory_reserved() / 2**20,
    }
    dist.destroy_process_group()
    return row


def measure_apart(setting: str, options: list[str]) -> dict[str, Any]:
    """Measure in a process with this setting; return its row, or one with an error."""
    result = subprocess.run(
        [sys.executable, __file__, "--here", *options],
        env={**os.environ, VARIABLE: setting},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        return {"loading": setting, "error": f"exit code {result.returncode}"}
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def main() -> int:
    """Measure each setting; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(quick=args.quick)))
        return 0
    rows: list[dict[str, Any]] = []
    print(f"{VARIABLE:<20} {' '.join(f'{name:>19}' for name in COLUMNS)}")
    for setting in SETTINGS:
        row = measure_apart(setting, ["--quick"] if args.quick else [])
        cells = " ".join(f"{row[name]:>19.1f}" for name in COLUMNS if name in row)
        print(f"{setting:<20} {cells or row['error']}", flush=True)
        rows.append(row)
        if args.json is not None:
            args.json.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
