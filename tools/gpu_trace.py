"""Write a trace of two training steps on one GPU, as one of 8 ranks of a simulated H100 node.

    python tools/gpu_trace.py [--out DIR] [--quick]

It trains the transformer of `bench step` and prints the profiler's report. step-trace.json, for
ui.perfetto.dev, has the lanes of fsdp_ext, and, where torch.profiler works, the GPU's kernels
beside them on one time axis. The collectives are simulated, so the times of the link are
assumptions, but kernels, copies and waits are real. --quick trains a small model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fsdp_ext
from bench.models.training import LARGE, SMALL, WARMUP, Training, shard_ours
from fsdp_ext import Simulated
from fsdp_ext.comm.link import H100_NODE

RANKS = 8
STEPS = 2
NAME = "step-trace.json"


def trace(device: torch.device, out: Path, *, quick: bool) -> None:
    """Train, write the trace into the folder and print the profiler's report."""
    warnings.simplefilter("ignore")  # that all is simulated
    transport = Simulated(RANKS, H100_NODE)
    transport.init_process_group()
    build: Any = partial(shard_ours, transport=transport)
    training = Training(build, SMALL if quick else LARGE, 1, device)
    for _ in range(WARMUP):
        training.step()
    is_real = device.type == "cuda" and not torch.cuda.get_device_name().startswith("Emulated")
    activities = torch.profiler.ProfilerActivity
    kernels = (
        torch.profiler.profile(activities=[activities.CPU, activities.CUDA])
        if is_real
        else contextlib.nullcontext()
    )
    with kernels as seen, fsdp_ext.profile(training.model) as lanes:
        for _ in range(STEPS):
            training.step()
    with tempfile.TemporaryDirectory() as directory:
        beside = None
        if seen is not None:
            beside = Path(directory) / "torch.json"
            seen.export_chrome_trace(str(beside))
        lanes.save_trace(out / NAME, beside)
    lanes.report()


def main() -> None:
    """Read the options and write the trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trace(torch.device("cuda", 0), args.out, quick=args.quick)
    print(f"{args.out / NAME}: {(args.out / NAME).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
