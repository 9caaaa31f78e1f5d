"""TRL's SFTTrainer trains with fsdp_ext as with PyTorch's FSDP, once it is patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from ecosystem.accelerates import accelerate_on_these_ranks, present_cpus_as_gpus
from ecosystem.families import FAMILIES, VOCABULARY, subject
from ecosystem.systems import fsdp_of
from support.launcher import run_ranks
from support.parity import EXACT, Tolerance, assert_same
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fsdp_ext

STEPS = 4
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has a number for each of a few words."""
    words = [*SPECIAL.values(), *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    vocabulary = {word: number for number, word in enumerate(words)}
    by_word = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=by_word, **SPECIAL)


def texts() -> Dataset:
    """Return texts of different lengths, the same for every system."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for row in range(32):
        numbers = torch.randint(VOCABULARY - len(SPECIAL), (6 + row % 5,), generator=generator)
        made.append({"text": " ".join(f"w{number}" for number in numbers.tolist())})
    return Dataset.from_list(made)


def train(system: str, version: int, folder: Path) -> dict[str, Any]:
    """Return the logged losses and norms."""
    with accelerate_on_these_ranks(), fsdp_of(system):
        torch.manual_seed(0)
        arguments = SFTConfig(
            output_dir=str(folder / system),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=False,
            max_steps=STEPS,
            max_length=12,
            logging_steps=1,
            learning_rate=0.01,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": version,
                "use_orig_params": True,
                "cpu_ram_efficient_loading": False,  # on accelerators only
                "sync_module_states": False,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": [FAMILIES["llama"].block],
            },
        )
        assert arguments.device.type == "cpu"  # makes accelerate's state
        present_cpus_as_gpus()
        trainer = SFTTrainer(
            model=subject("llama"),
            args=arguments,
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
        trainer.train()
        kinds = fsdp_ext.FSDPModule, fsdp_ext.FullyShardedDataParallel
        assert isinstance(trainer.model_wrapped, kinds) == (system == "fsdp_ext")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == STEPS
        found: dict[str, Tensor] = {}
        for step, log in enumerate(logs):
            for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
                found[f"{name} {step}"] = torch.tensor(log[name])
        return found


def compare(folder: str) -> None:
    for version in (1, 2):
        theirs, ours = (train(system, version, Path(folder)) for system in ("torch", "fsdp_ext"))
        # FSDP1 adds up norms in another order, and gradients are scaled by them.
        tolerance = EXACT if version == 2 else Tolerance(1e-6, 0.0)
        assert_same(f"PyTorch's FSDP{version}", theirs, ours, tolerance)


def test_the_sft_trainer_logs_what_it_logs_with_torchs_fsdp(tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path), fresh=True)  # a thread of datasets stays
