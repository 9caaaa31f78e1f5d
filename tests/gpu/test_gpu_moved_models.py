"""A model that is moved to the host leaves no memory on the GPU, and its values arrive whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import _runtime_utils

from fsdp_ext import FullyShardedDataParallel as FSDP
from fsdp_ext import clip_grad_norm_, fully_shard
from fsdp_ext.optim import SGD

WIDTH = 512
LAYERS = 4
SMALL = 64 << 10  # bytes, of tables


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def sharded() -> Any:
    model = layers().cuda()
    for layer in model:
        fully_shard(layer, bucket_bytes=0)
    return fully_shard(model)


def wrapped(*, use_orig_params: bool) -> Any:
    return FSDP(
        layers().cuda(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        use_orig_params=use_orig_params,
    )


def train(model: Any, optimizer: Any, steps: int = 2) -> list[Tensor]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def move(model: Any, device: str) -> None:
    model.to(device, non_blocking=True)


def move_handles(model: Any, device: str) -> None:
    """Move the shards as verl does for FSDP1."""
    _runtime_utils._lazy_init(model, model)
    for handle in model._all_handles:
        flat = handle.flat_param
        assert flat.data.data_ptr() == flat._local_shard.data_ptr()
        assert flat.data.size() == flat._local_shard.size()
        handle.flat_param_to(torch.device(device), non_blocking=True)
        flat._local_shard = flat.data


MODELS: list[tuple[Callable[[], Any], Callable[[Any, str], None]]] = [
    (sharded, move),
    (lambda: wrapped(use_orig_params=True), move),
    (lambda: wrapped(use_orig_params=False), move),
    (lambda: wrapped(use_orig_params=True), move_handles),
    (lambda: wrapped(use_orig_params=False), move_handles),
]


def _memory() -> None:
    for make, mover in MODELS:
        stays, moves = [], []
        for losses in (stays, moves):
            before = allocated()
            model = make()
            of_shards = allocated() - before
            optimizer = SGD(model.parameters(), lr=0.05)
            losses += train(model, optimizer)
            if losses is moves:
                mover(model, "cpu")
                assert allocated() - before < SMALL
                mover(model, "cuda")
                assert allocated() - before <= of_shards + SMALL
            losses += train(model, optimizer)
            del model, optimizer
        assert all(map(torch.equal, stays, moves))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_moved_model_leaves_no_memory_behind(world_size: int) -> None:
    run_ranks(_memory, world_size, timeout=150.0, device="cuda")


def _late_copies() -> None:
    for make, mover in MODELS:
        model = make()
        expected = [param.detach().cpu().clone() for param in model.parameters()]
        torch.cuda._sleep(100_000_000)  # the copies to the host begin behind this
        mover(model, "cpu")
        found = [param.detach().cpu().clone() for param in model.parameters()]
        for want, have in zip(expected, found, strict=True):
            assert have.device.type == "cpu"
            want, have = (getattr(each, "_local_tensor", each) for each in (want, have))
            assert torch.equal(want, have)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_are_read_when_they_have_arrived_on_the_host(world_size: int) -> None:
    run_ranks(_late_copies, world_size, timeout=150.0, device="cuda")


def _loaded_from_late_copies() -> None:
    source, model = sharded(), sharded()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1)
    expected = [param.to_local().cpu().clone() for param in source.parameters()]
    model.cpu()
    torch.cuda._sleep(100_000_000)
    state = {
        name: value.to("cpu", non_blocking=True) for name, value in source.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    model.float()  # it reads what was loaded
    for want, param in zip(expected, model.parameters(), strict=True):
        assert torch.equal(want, param.to_local())


@pytest.mark.timeout(120)
def test_a_state_that_arrives_on_the_host_late_may_be_loaded() -> None:
    run_ranks(_loaded_from_late_copies, 1, timeout=100.0, device="cuda")
