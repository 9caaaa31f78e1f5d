"""The examples with libraries run, learn and save what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from support.examples import EXAMPLES, run_example
from support.tools import load_tool


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]


def test_finetuning_learns_and_saves_what_from_pretrained_loads(tmp_path: Path) -> None:
    printed = run_example("finetune_transformers.py", "--steps", "11", "--save", str(tmp_path))
    first, last = losses(printed)
    assert last < first - 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is transformers.LlamaForCausalLM


def test_finetuning_has_parameters_in_fp32_of_a_folder_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    bytes_alone = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={}, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone).save_pretrained(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    model, _, _ = load_tool(EXAMPLES / "finetune_transformers.py").load(tmp_path)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_accelerate_learns_with_fsdp_ext() -> None:
    printed = run_example("accelerate_fsdp.py", "--steps", "11")
    first, last = losses(printed)
    assert last < first - 0.5
    assert "bucket" in printed
