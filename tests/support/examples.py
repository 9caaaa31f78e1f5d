"""Runs the examples as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str, ranks: int = 2) -> str:
    """Run an example on several ranks, and return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
