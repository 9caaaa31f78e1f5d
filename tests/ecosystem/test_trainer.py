"""transformers' Trainer trains with fsdp_ext as with FSDP2, once it is patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ecosystem.accelerates import accelerate_on_these_ranks, present_cpus_as_gpus
from ecosystem.families import FAMILIES, LENGTH, VOCABULARY, subject
from ecosystem.systems import fsdp_of
from support.launcher import run_ranks
from support.parity import ROUNDING, assert_same, device
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import fsdp_ext


class Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens, the same for every system."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, VOCABULARY, (32, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(system: str, folder: Path) -> dict[str, Any]:
    """Return the logged losses and norms, and the saved model's parameters."""
    with accelerate_on_these_ranks(), fsdp_of(system, clips=True):
        torch.manual_seed(0)
        model = subject("llama")
        arguments = TrainingArguments(
            output_dir=str(folder / system),
            use_cpu=device().type == "cpu",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            logging_steps=1,
            learning_rate=0.01,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": [FAMILIES["llama"].block],
                "state_dict_type": "FULL_STATE_DICT",
            },
        )
        assert arguments.device.type == device().type  # makes accelerate's state
        present_cpus_as_gpus()
        trainer = Trainer(model=model, args=arguments, train_dataset=Sequences())
        trainer.train()
        assert isinstance(trainer.model_wrapped, fsdp_ext.FSDPModule) == (system == "fsdp_ext")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == 4
        found = {f"loss {n}": torch.tensor(log["loss"]) for n, log in enumerate(logs)}
        found |= {f"norm {n}": torch.tensor(log["grad_norm"]) for n, log in enumerate(logs)}
        trainer.save_model()
        return found | (trainer.accelerator.get_state_dict(trainer.model_wrapped) or {})


def compare(folder: str) -> None:
    theirs, ours = (train(system, Path(folder)) for system in ("torch", "fsdp_ext"))
    assert_same("PyTorch's", theirs, ours, ROUNDING[torch.float32])  # norms agree up to rounding


def test_the_trainer_logs_the_losses_of_fsdp2_and_saves_its_parameters(tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path))
    assert (tmp_path / "fsdp_ext" / "model.safetensors").exists()
