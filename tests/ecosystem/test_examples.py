"""The examples with libraries run, learn and save what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import transformers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """Run an example on two ranks, as a user does; return what it printed."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *ranks, str(EXAMPLES / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]


def test_finetuning_learns_and_saves_what_from_pretrained_loads(tmp_path: Path) -> None:
    printed = run("finetune_transformers.py", "--steps", "11", "--save", str(tmp_path))
    first, last = losses(printed)
    assert last < first - 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is transformers.LlamaForCausalLM


def test_accelerate_learns_with_fsdp_ext() -> None:
    printed = run("accelerate_fsdp.py", "--steps", "11")
    first, last = losses(printed)
    assert last < first - 0.5
    assert "bucket" in printed
