"""The examples with libraries run, learn and save what they say."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from support.examples import run_example


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]


def test_finetuning_learns_and_saves_what_from_pretrained_loads(tmp_path: Path) -> None:
    printed = run_example("finetune_transformers.py", "--steps", "11", "--save", str(tmp_path))
    first, last = losses(printed)
    assert last < first - 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is transformers.LlamaForCausalLM


def test_accelerate_learns_with_fsdp_ext() -> None:
    printed = run_example("accelerate_fsdp.py", "--steps", "11")
    first, last = losses(printed)
    assert last < first - 0.5
    assert "bucket" in printed
