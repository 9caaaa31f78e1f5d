"""The tutorial learns as under PyTorch's FSDP1, with half of DDP's memory on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TUTORIAL = Path(__file__).resolve().parents[2] / "examples" / "fsdp_tutorial.py"
ROW = re.compile(r"^(\w+) +([\d.]+) +([\d.]+) % +([\d.]+) MB +(-?[\d.]+) MB$", re.MULTILINE)


def run(*arguments: str) -> str:
    """Run the example on two ranks, as a user does; return what it printed."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *ranks, str(TUTORIAL), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.exhaustive
def test_it_learns_as_with_fsdp1_and_saves_what_a_plain_network_loads(tmp_path: Path) -> None:
    sizes = ["--epochs", "2", "--images", "768", "--width", "128", "--save", str(tmp_path)]
    printed = run(*sizes, "--systems", "fsdp_ext", "fsdp1", "ddp")
    rows = {name: values for name, *values in ROW.findall(printed)}
    assert list(rows) == ["fsdp_ext", "fsdp1", "ddp"], printed
    ours, theirs, ddp = rows.values()
    assert ours[:2] == theirs[:2]  # test loss and accuracy
    assert float(ours[1]) > 80
    assert abs(float(ours[0]) - float(ddp[0])) < 1e-4
    assert 0.45 < float(ours[2]) / float(ddp[2]) < 0.55
    saved = [torch.load(tmp_path / f"network-{name}.pt") for name in ("fsdp_ext", "fsdp1")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
