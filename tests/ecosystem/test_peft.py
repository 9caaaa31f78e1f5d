"""LoRA and QLoRA adapters of peft train on a sharded model as unsharded and as under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from ecosystem.families import subject
from ecosystem.training import BF16, ROUGH, accumulate_and_clip
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from support.fsdp1_parity import FSDP, run, torch_fsdp
from support.launcher import run_ranks
from support.models import Batch, Subject, Unit
from support.parity import Case, adamw, assert_same, check, load_system, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_ext import fully_shard


class Lora(Subject):
    """A Llama in bf16 or fp32 with adapters in fp32.

    Args:
        dtype: of the Llama.
        storage: the dtype that bitsandbytes keeps 4-bit weights in; None for weights of `dtype`.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, storage: torch.dtype | None = None
    ) -> None:
        super().__init__()
        inner = subject("llama").to(dtype)
        if storage is not None:
            for unit in inner.units():
                quantize(unit, dtype, storage)
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


def quantize(module: nn.Module, dtype: torch.dtype, storage: torch.dtype) -> None:
    """Replace the linear layers in a module, as transformers does when it loads a checkpoint."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            layer = Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                quant_storage=storage,
            )
            layer.load_state_dict(child.state_dict())
            setattr(module, name, layer.to("cpu"))  # which quantizes it
        else:
            quantize(child, dtype, storage)


def qlora_in_bf16() -> Lora:
    """Return a model whose parameters all have one dtype, which FSDP1 needs."""
    model = Lora(torch.bfloat16, torch.bfloat16)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.bfloat16()
    return model


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
    Case(
        "adapters on 4 bits, stored as bytes",
        partial(Lora, torch.float32, torch.uint8),
        step=accumulate_and_clip,
        unsharded=ROUGH,
    ),
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


def by_fully_shard(model: Lora, system: str) -> nn.Module:
    loaded = load_system(system)
    policy = loaded.mixed_precision_policy(**BF16)
    for unit in model.units():
        loaded.fully_shard(unit, mp_policy=policy)
    module: nn.Module = loaded.fully_shard(model, mp_policy=policy)
    return module


def by_wrapper(model: Lora, system: str) -> nn.Module:
    policy = ModuleWrapPolicy({type(model.units()[0])})
    wrap = FSDP if system == "fsdp_ext" else torch_fsdp
    return wrap(model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(**BF16))


def _in_bf16(shard: Callable[[Lora, str], nn.Module]) -> None:
    found = []
    for system in ("fsdp2", "fsdp_ext"):
        torch.manual_seed(0)
        model = qlora_in_bf16()
        sharded = shard(model, system)
        optimizer = adamw(param for param in sharded.parameters() if param.requires_grad)
        losses: dict[str, Tensor | None] = {}
        for step in range(4):
            optimizer.zero_grad()
            loss = run(sharded, model, step)
            if hasattr(model, "_fsdp_ext_unit"):
                model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
            loss.backward()
            optimizer.step()
            losses[f"loss {step}"] = loss.detach()
        found.append(losses)
    assert_same("PyTorch's", *found)


@pytest.mark.parametrize("shard", [by_fully_shard, by_wrapper])
def test_4_bit_weights_that_are_stored_as_bf16_train_as_under_torchs_fsdp(
    shard: Callable[[Lora, str], nn.Module],
) -> None:
    # The packed numbers may look like NaN in bf16, and NaN equals nothing. So losses are compared.
    run_ranks(_in_bf16, 2, shard)


def _not_quantized() -> None:
    with pytest.raises(NotImplementedError, match=r"'weight' is a Params4bit .* not quantized yet"):
        fully_shard(Linear4bit(4, 4, bias=False))


def test_4_bit_weights_that_are_not_quantized_yet_are_refused() -> None:
    run_ranks(_not_quantized, 2)
