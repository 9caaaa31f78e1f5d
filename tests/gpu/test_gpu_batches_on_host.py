"""A batch on the host trains as the same batch on the GPU, where the root moves it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_ext

STEPS = 2
WIDTH = 6  # divides by the numbers of ranks


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _checkpointed(model: nn.Module, x: Tensor, *, use_reentrant: bool) -> Tensor:
    output: Tensor = checkpoint(model, x, use_reentrant=use_reentrant)
    return output.square().mean()


def _penalized(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    # A host adds up in another order than a GPU.
    return output.square().mean() + gradient.to(output.device).square().mean()


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": _plain,
    "checkpointed": functools.partial(_checkpointed, use_reentrant=False),
    "checkpointed, reentrant": functools.partial(_checkpointed, use_reentrant=True),
    "gradient penalty": _penalized,
}


SYSTEMS = {
    "unsharded": lambda module, **options: module,
    "fsdp_ext": fsdp_ext.fully_shard,
    "FSDP2": torch.distributed.fsdp.fully_shard,
}


def _train(system: str, name: str, device: str) -> list[Tensor]:
    """Return the losses, and the gradients of the batches and of the parameters."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).cuda()
    # A second backward of the same graph needs the parameters that the first one had.
    options = {"reshard_after_forward": False} if name == "gradient penalty" else {}
    for module in (model[0], model[2], model):
        SYSTEMS[system](module, **options)
    results = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to(device).requires_grad_()
        loss = LOSSES[name](model, x)
        loss.backward()
        assert x.grad is not None, "the batch has no gradient"
        assert x.grad.device == x.device
        results += [loss.detach().cpu(), x.grad.cpu()]
        for parameter in model.parameters():
            gradient = parameter.grad
            whole = gradient if system == "unsharded" else gradient.full_tensor()
            results.append(whole.cpu())
    return results


def _compare() -> None:
    different = []
    for name in LOSSES:
        expected = _train("unsharded", name, "cuda")
        for system in ("fsdp_ext", "FSDP2"):
            if (system, name) == ("FSDP2", "gradient penalty"):
                continue  # FSDP2 has freed its parameters before the second backward
            for device in ("cuda", "cpu"):
                got = _train(system, name, device)
                if not all(map(torch.equal, got, expected)):
                    different.append(f"{name}, {system}, a batch on {device}")
    assert different == [], different


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_on_the_host_train_as_those_on_the_gpu(world_size: int) -> None:
    run_ranks(_compare, world_size, timeout=100.0, device="cuda")
