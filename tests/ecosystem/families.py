"""Models of transformers, made from small configurations with random weights, as test subjects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import tqdm
import transformers
from support.models import Batch, Subject, Unit
from torch import Tensor

# A thread that looks after progress bars would stay in the ranks' processes.
tqdm.tqdm.monitor_interval = 0

VOCABULARY = 96
LENGTH = 10
ROWS = 3
PIXELS = 16
LABELS = 5
FEW = 3


@dataclass(frozen=True)
class Family:
    """How to make a model of one architecture.

    Args:
        model: name of the model's class.
        config: name of the configuration's class.
        block: name of the class of its layers, each of which is a unit.
        settings: of the configuration.
        inputs: what its batches hold: "tokens", "few tokens" of the vocabulary, which leave experts
            unused, or "pixels".
    """

    model: str
    config: str
    block: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: str = "tokens"


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", "LlamaDecoderLayer", _GROUPED),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        "GPT2Block",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "Qwen3MoeDecoderLayer",
        _GROUPED
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"decoder_sparse_step": 1, "output_router_logits": True},
        inputs="few tokens",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        "MixtralDecoderLayer",
        _GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 1},
        inputs="few tokens",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        "T5Block",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2}
        | {"num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", "BertLayer", _DECODER),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        "ViTLayer",
        {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "image_size": PIXELS, "patch_size": 4, "num_labels": LABELS},
        inputs="pixels",
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        "MambaBlock",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


class _Subject(Subject):
    """What tests ask of a model, beside the class of transformers."""

    family: Family

    def units(self) -> list[Unit]:
        names = (self.family.block, f"FSDP{self.family.block}")
        return [module for module in self.modules() if type(module).__name__ in names]

    def batch(self, generator: torch.Generator) -> Batch:
        if self.family.inputs == "pixels":
            pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
            labels = torch.randint(LABELS, (ROWS,), generator=generator)
            return (), {"pixel_values": pixels, "labels": labels}
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        if self.family.inputs == "few tokens":
            tokens = tokens[0, tokens % FEW]
        return (), {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, output: Any) -> Tensor:
        loss: Tensor = output.loss
        return loss


def subject(name: str) -> Any:
    """Make the model of a family, with a test subject's methods."""
    family = FAMILIES[name]
    cls = getattr(transformers, family.model)
    config = getattr(transformers, family.config)(**family.settings)
    # A class with the same name, because transformers looks at it.
    made = type(family.model, (cls, _Subject), {"family": family, "__module__": cls.__module__})
    return made(config)
