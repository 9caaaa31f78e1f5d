"""A model with scales, and its training sharded or as the mean of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 6


class Scale(nn.Module):
    """Multiplies in float32, as routers and norms often do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return (x.float() * self.weight.float()).to(x.dtype)


def batch(step: int) -> Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH)


def average(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
            dist.all_reduce(param.grad)


def train(model: Any, *, unsharded: bool) -> list[Tensor]:
    """Train two steps, the second of two micro-batches; return losses, gradients, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step, micro_batches in enumerate((1, 2)):
        for number in range(micro_batches):
            if not unsharded:
                model.set_requires_gradient_sync(number + 1 == micro_batches)
            loss = model(batch(10 * step + number)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        if unsharded:
            average(model)
        found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(p.detach()) for p in model.parameters()]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
