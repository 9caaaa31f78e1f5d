"""Offloaded units train as those on the GPU, and take less of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_ext import FullyShardedDataParallel as FSDP
from fsdp_ext import fully_shard

WIDTH = 1024
LAYERS = 4
STEPS = 4
MESSAGE_BYTES = 1 << 20


def _train(policy: OffloadPolicy) -> tuple[list[Tensor], list[Tensor], int]:
    """Return the losses, this rank's gradients of the first step, and the GPU's memory."""
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in (*model, model):  # in several messages
        fully_shard(layer, offload_policy=policy, max_message_bytes=MESSAGE_BYTES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    losses, gradients = [], []
    for _ in range(STEPS):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach().cpu())
        gradients = gradients or [p.grad.to_local().cpu().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # gathers have read the shards when it returns
            evaluated = model(x).mean()
            for parameter in model.parameters():
                parameter.mul_(0.5)
        losses.append(evaluated.cpu())
    on_host = isinstance(policy, CPUOffloadPolicy)
    for parameter in model.parameters():
        local = parameter.to_local()
        assert (local.device.type == "cpu") == on_host
        assert local.is_pinned() == on_host
    return losses, gradients, torch.cuda.memory_allocated() - before


def _compare() -> None:
    losses, gradients, on_gpu = _train(OffloadPolicy())
    theirs, of_first_step, offloaded = _train(CPUOffloadPolicy())
    for mine, other in zip(of_first_step, gradients, strict=True):
        assert torch.equal(mine, other)
    torch.testing.assert_close(theirs, losses)  # optimizers may round differently there
    assert offloaded < on_gpu


@pytest.mark.timeout(150)
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_units_train_as_others(world_size: int) -> None:
    run_ranks(_compare, world_size, timeout=100.0, device="cuda")


def _has_whole_state() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    of_gpus = dist.new_group(backend="nccl")  # which cannot gather where the shards are
    wrapped = FSDP(model, of_gpus, cpu_offload=CPUOffload(True), device_id=0)
    state = wrapped.state_dict()
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[name].cpu(), expected[name]) for name in expected)


def test_offloaded_shards_are_gathered_where_their_group_can() -> None:
    run_ranks(_has_whole_state, 2, device="cuda")


def _moves_what_it_loaded() -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
    state = {
        name: distribute_tensor(whole.detach().cuda(), mesh, model.get_parameter(name).placements)
        for name, whole in plain.named_parameters()
    }
    for name, tensor in state.items():  # one at a time: the others are still on meta
        model.load_state_dict({name: tensor}, assign=True, strict=False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(RuntimeError, match="is offloaded to the host, but its parameters are on"):
        model(x.cuda())
    model.to("cpu")
    torch.testing.assert_close(model(x.cuda()).cpu(), plain(x))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().is_pinned()


def test_shards_that_were_loaded_on_the_gpu_may_be_moved_to_the_host() -> None:
    run_ranks(_moves_what_it_loaded, 2, device="cuda")


def _runs_with_shards_on_the_host() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 8).cuda()
    x = torch.ones(2, 8, device="cuda")
    expected = model(x).detach()
    fully_shard(model)
    elsewhere = (
        rf"runs on {x.device}, but its shards are on cpu\. Move them by "
        rf"module\.to\('{x.device}'\)"
    )
    for _ in range(2):  # before the first forward, and after it
        model.to("cpu")
        with pytest.raises(RuntimeError, match=elsewhere):
            model(x)
        model.to(x.device)
        assert model(x).equal(expected)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=elsewhere):
        model(x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_on_the_host_without_an_offload_policy_raise(world_size: int) -> None:
    run_ranks(_runs_with_shards_on_the_host, world_size, device="cuda")
