"""The example gives an engine in another process the weights that the trainer has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stream_weights.py"
ROUND = re.compile(r"^round \d: the engine loaded 10 weights, loss ([\d.]+), .* is ([\d.]+)$", re.M)


@pytest.mark.exhaustive
def test_the_engine_has_the_trainers_weights_in_each_round() -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *ranks, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    losses = ROUND.findall(done.stdout)
    assert len(losses) == 3, done.stdout
    assert all(engine == trainer for engine, trainer in losses)
    assert len({engine for engine, _ in losses}) == 3  # the weights changed
