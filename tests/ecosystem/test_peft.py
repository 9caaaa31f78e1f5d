"""LoRA adapters of peft train on a sharded model as unsharded and as under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ecosystem.families import subject
from ecosystem.training import ROUGH, accumulate_and_clip
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from support.launcher import run_ranks
from support.models import Batch, Subject, Unit
from support.parity import Case, adamw, check, load_system, whole
from torch import Tensor


class Lora(Subject):
    """A Llama in bf16 or fp32 with adapters in fp32."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        inner = subject("llama").to(dtype)
        self.made_units, self.made_batch = inner.units, inner.batch
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        self.peft: Any = get_peft_model(inner, config)

    def units(self) -> list[Unit]:
        return self.made_units()

    def batch(self, generator: torch.Generator) -> Batch:
        return self.made_batch(generator)

    def loss(self, output: Any) -> Tensor:
        loss: Tensor = output.loss
        return loss

    def forward(self, **kwargs: Any) -> Any:
        return self.peft(**kwargs)


class LoraOnHalf(Lora):
    """Frozen parameters in bf16 and adapters in fp32, in the same units."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        for param in self.parameters():
            if param.requires_grad:
                param.data = param.data.float()


CASES = [
    Case("adapters on fp32", Lora, optimizer=adamw, unsharded=ROUGH),
    Case("adapters on bf16", LoraOnHalf, optimizer=adamw, unsharded=None),
    Case("adapters, accumulated and clipped", Lora, step=accumulate_and_clip, unsharded=ROUGH),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_adapters_train_as_unsharded_and_as_under_fsdp2(case: Case) -> None:
    check(case, 2)


def _saved() -> None:
    states = []
    for name in ("fsdp2", "fsdp_ext"):
        torch.manual_seed(0)
        model = Lora()
        shard = load_system(name).fully_shard
        for unit in model.units():
            shard(unit)
        shard(model)
        state = get_peft_model_state_dict(model.peft)
        assert state
        assert all("lora" in key for key in state)
        states.append({key: whole(value) for key, value in state.items()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


def test_the_state_of_adapters_has_the_same_names_and_values_as_under_fsdp2() -> None:
    run_ranks(_saved, 2)
