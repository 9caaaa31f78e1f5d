"""A decoder-only transformer over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model.

    Attributes:
        vocabulary: number of different tokens.
        context: the most tokens that the model sees at once.
        dim: width of the residual stream; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads in each block.
    """

    vocabulary: int
    context: int
    dim: int
    layers: int
    heads: int


DEFAULT = GPTConfig(vocabulary=256, context=64, dim=128, layers=4, heads=4)


class Attention(nn.Module):
    """Causal self-attention, (batch, tokens, dim) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.project = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, dim))


class MLP(nn.Module):
    """Two linear layers with a GELU between them; the hidden layer is four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.dim, 4 * config.dim)
        self.project = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(F.gelu(self.expand(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer. Each block is a unit of its own when it is sharded."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token and position embeddings, `layers` blocks, a norm and a linear head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.dim)
        self.position_embedding = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Fill the parameters from torch's default generator.

        The distribution is normal with deviation 0.02. Layers that write into the residual stream
        have 0.02 / sqrt(2 layers), so that its variance does not grow with depth (GPT-2, 2.3).
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(".project")
                deviation = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position.

        Args:
            tokens: int64, shape (batch, up to `context`).

        Returns:
            shape (batch, tokens, vocabulary), in the dtype of the parameters.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make() -> GPT:
    """Return the model that train_gpt.py trains by default, e.g. for `python -m fsdp_ext plan`."""
    return GPT(DEFAULT)
