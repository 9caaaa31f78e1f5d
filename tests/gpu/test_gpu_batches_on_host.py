"""Batches and outputs on the host train as those on the GPU."""

from __future__ import annotations

import functools
import threading
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


class _Block(nn.Module):
    """Returns a second output on the host, whose backward runs on the thread of the caller."""

    def __init__(self, reached: threading.Event, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reached, self.is_first, self.is_last = reached, is_first, is_last

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, hidden = self.gate(x).sigmoid(), self.layer(x)
        on_host = gates.mean(0).cpu()
        if self.is_first:
            on_host.register_hook(lambda _: self.reached.set())
        if self.is_last:
            hidden.register_hook(self._wait)
        return hidden.tanh() * gates, on_host * 2

    # The GPU's thread is in backward of this block when the other one has reached all blocks.
    def _wait(self, _: Tensor) -> None:
        assert self.reached.wait(30)
        self.reached.clear()


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        reached = threading.Event()
        self.blocks = nn.ModuleList(
            _Block(reached, is_first=i == 0, is_last=i == 3) for i in range(4)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        on_host = torch.zeros(WIDTH)
        for block in self.blocks:
            x, of_block = block(x)
            on_host = on_host + of_block
        return on_host.square().mean(), self.head(x)


def _train_both_outputs(system: str, *, offloads: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = _Blocks() if offloads and system != "unsharded" else _Blocks().cuda()
    policy = torch.distributed.fsdp.CPUOffloadPolicy() if offloads else None
    for module in (*model.blocks, model):
        SYSTEMS[system](module, **({"offload_policy": policy} if offloads else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for step in range(2 * STEPS):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        on_host, output = model(x)
        loss = on_host + output.square().mean().cpu()
        if offloads:  # of the sharded parameters, where they are
            squares = [p.square().sum() for p in model.parameters()]
            loss = loss + sum(getattr(s, "full_tensor", lambda s=s: s)().cpu() for s in squares)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return results


def _compare_outputs(offloads: bool) -> None:
    expected = _train_both_outputs("unsharded", offloads=offloads)
    got = _train_both_outputs("fsdp_ext", offloads=offloads)
    torch.testing.assert_close(got, expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("offloads", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_on_the_host_train_as_without_sharding(world_size: int, offloads: bool) -> None:
    run_ranks(_compare_outputs, world_size, offloads, timeout=100.0, device="cuda")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_on_the_host_train_as_those_on_the_gpu(world_size: int) -> None:
    run_ranks(_compare, world_size, timeout=100.0, device="cuda")
