"""A gradient penalty, as WGAN-GP has it, trains sharded as it does unsharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn

from fsdp_ext import fully_shard


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Softplus())]
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *hidden, nn.Linear(6, 1))


def trained(model: Any, ranks: list[int]) -> list[Tensor]:
    """Take three steps of a critic on the batches of ``ranks``, and return its gradients."""
    parameters = list(model.parameters())  # the modules have others while units stay unsharded
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            real, fake = torch.randn(2, 5, 4, generator=generator)
            share = torch.rand(5, 1, generator=generator)
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            loss = model(fake).mean() - model(real).mean() + penalty
            (loss / len(ranks)).backward()
        for param in parameters:
            grad = param.grad
            gradients.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone())
        optimizer.step()
    return gradients


def penalised() -> None:
    model = critic()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=False, bucket_bytes=0)
    fully_shard(model, reshard_after_forward=False, bucket_bytes=0)
    want = trained(critic(), list(range(dist.get_world_size())))
    for mine, theirs in zip(trained(model, [dist.get_rank()]), want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_gradient_penalty_trains_with_units_that_stay_unsharded() -> None:
    run_ranks(penalised, 2)
