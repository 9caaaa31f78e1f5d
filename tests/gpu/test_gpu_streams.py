"""Streams of the user, of offloaded states and of replicas are ordered with those of the lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import test_hybrid_sharding, test_reshard_groups
from support.gpu_cases import DIRECT, PACKED, losses_of, train_cases
from support.launcher import run_ranks
from support.models import Stack
from torch import Tensor, nn
from train import test_rare_programs

from fsdp_ext import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, offload_optimizer

WIDTH = 64
STEPS = 4
MESSAGE_BYTES = 256


class _Branches(nn.Module):
    """Adds the outputs of two layers, each of which runs on a stream of its own."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        outputs = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(here)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                outputs.append(layer(x).relu())
        for output, stream in zip(outputs, self.streams, strict=True):
            here.wait_stream(stream)
            output.record_stream(here)
        left, right = outputs
        return left + right


def _train_branches(shard: Callable[[nn.Module], object], on_streams: bool) -> list[Tensor]:
    torch.manual_seed(0)
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() if on_streams else here for _ in range(2)]
    model = nn.Sequential(*(_Branches(streams) for _ in range(3))).cuda()
    for block in model:
        shard(block)
    shard(model)
    losses = losses_of(model, WIDTH, STEPS)
    return [*losses, *(_whole(parameter) for parameter in model.parameters())]


def _whole(parameter: Any) -> Tensor:
    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    result: Tensor = tensor.detach().clone()
    return result


def _compare_branches() -> None:
    expected = _train_branches(lambda module: None, on_streams=False)
    got = _train_branches(fully_shard, on_streams=True)
    assert all(map(torch.equal, got, expected))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_of_a_unit_may_run_on_streams_of_the_user(world_size: int) -> None:
    run_ranks(_compare_branches, world_size, timeout=80.0, device="cuda")


class _Conditioned(nn.Module):
    """Adds what two layers make of a condition, on a stream of the user. It needs no gradient."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        condition = x.detach()
        if self.stream is None:
            return self.main(x) + self.layers(condition)
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            added = self.layers(condition)
        added.register_hook(_late)  # backward calls it on the stream
        here.wait_stream(self.stream)
        for tensor, stream in ((condition, self.stream), (added, here)):
            tensor.record_stream(stream)
        return self.main(x) + added


def _late(gradient: Tensor) -> Tensor:
    torch.cuda._sleep(20_000_000)
    return gradient


def _train_conditioned(shard: Callable[[nn.Module], object], on_stream: bool) -> list[Tensor]:
    torch.manual_seed(0)
    stream = torch.cuda.Stream() if on_stream else None
    model = nn.Sequential(*(_Conditioned(stream) for _ in range(6))).cuda()
    for block in model:
        shard(block)
    shard(model)
    results = losses_of(model, WIDTH, STEPS)
    x = torch.ones(4, WIDTH, device="cuda")
    for _ in range(STEPS):  # gradients stay, since new memory for them would order the streams
        model(x).square().mean().backward()
    results += [_whole(parameter.grad) for parameter in model.parameters()]
    return [*results, *(_whole(parameter) for parameter in model.parameters())]


def _compare_conditioned() -> None:
    expected = _train_conditioned(lambda module: None, on_stream=False)
    shard: Any = partial(fully_shard, bucket_bytes=0)
    assert all(map(torch.equal, _train_conditioned(shard, on_stream=True), expected))


@pytest.mark.timeout(90)
def test_a_slot_is_not_overwritten_while_a_stream_of_the_user_reads_it() -> None:
    run_ranks(_compare_conditioned, 2, timeout=80.0, device="cuda")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("loss", [test_rare_programs.penalised, test_rare_programs.embedded])
def test_autograd_adds_to_sharded_gradients_behind_their_reduction(loss: Any) -> None:
    run_ranks(test_rare_programs.compare, 2, loss, False, False, timeout=80.0, device="cuda")


def _train(
    change: Callable[[Any, torch.optim.Optimizer], None], options: dict[str, Any] | None = None
) -> list[Tensor]:
    """Train on the GPU with options of each unit; return the losses and the parameters."""
    torch.manual_seed(0)
    model = Stack().cuda()
    for unit in [*model.units(), model]:
        fully_shard(unit, **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    change(model, optimizer)
    results = []
    for step in range(STEPS):
        args, kwargs = model.batch(torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        moved = (a.pin_memory().cuda(non_blocking=True) for a in args)
        loss = model.loss(model(*moved, **kwargs))
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
        for parameter in model.parameters():  # states on the host may be read at once
            moments: Any = optimizer.state[parameter]["exp_avg"]
            results.append(moments.to_local().clone())
    results += [_whole(parameter) for parameter in model.parameters()]
    return [result.cpu() for result in results]


def _offload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    offload_optimizer(optimizer, model)


def _compare_offloaded_states() -> None:
    expected = _train(lambda model, optimizer: None)
    assert all(map(torch.equal, _train(_offload), expected))


@pytest.mark.timeout(90)
def test_offloaded_states_are_stepped_as_others() -> None:
    run_ranks(_compare_offloaded_states, 2, timeout=80.0, device="cuda")


def _hook(on_stream: bool) -> Callable[[Any, torch.optim.Optimizer], None]:
    def double(gradient: Tensor) -> None:
        gradient.mul_(2)

    def change(model: Any, optimizer: torch.optim.Optimizer) -> None:
        stream = torch.cuda.Stream() if on_stream else None
        for unit in model.units():
            unit.set_all_reduce_hook(double, stream=stream)

    return change


def _compare_hooks() -> None:
    half: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    in_messages = {**half, "bucket_bytes": 0, "max_message_bytes": MESSAGE_BYTES}
    for options in ({}, half):
        expected = _train(_hook(on_stream=False), options)
        assert all(map(torch.equal, _train(_hook(on_stream=True), options), expected))
    for on_stream in (False, True):
        assert all(map(torch.equal, _train(_hook(on_stream), in_messages), expected))


@pytest.mark.timeout(90)
def test_a_hook_may_run_on_a_stream_of_the_user() -> None:
    run_ranks(_compare_hooks, 2, timeout=80.0, device="cuda")


def _read_elsewhere() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).cuda()
    expected = [layer.weight.detach().clone() for layer in model]
    for layer in model:
        fully_shard(layer, bucket_bytes=0)
    fully_shard(model)
    x = torch.ones(2, 64, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for layer in model:
            layer.unshard()  # the last ones do not fit the ring
    here.wait_stream(side)
    torch.cuda._sleep(50_000_000)
    read = [layer.weight.detach() * 1.0 for layer in model]
    for layer in model:
        layer.reshard()
    with torch.cuda.stream(side):
        taken = [torch.full((64, 64), 7.0, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    assert all(map(torch.equal, read, expected))
    assert all(tensor.eq(7).all() for tensor in taken)


@pytest.mark.timeout(90)
def test_overflow_slots_may_be_read_by_another_stream_of_the_user() -> None:
    run_ranks(_read_elsewhere, 2, timeout=80.0, device="cuda")


def _on_the_second_gpu() -> None:
    torch.manual_seed(0)
    first = torch.cuda.current_device()
    torch.cuda.set_device(1)
    model = Stack().cuda()
    model.register_buffer("elsewhere", torch.arange(3, device=f"cuda:{first}"))
    for unit in model.units():
        fully_shard(unit)
    fully_shard(model)
    torch.cuda.set_device(first)
    assert model.elsewhere.device == torch.device("cuda", 1)
    assert model.elsewhere.tolist() == [0, 1, 2]
    args, kwargs = model.batch(torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        loss = model.loss(model(*(a.cuda(1) for a in args), **kwargs))
        loss.backward()
        losses.append(loss.item())
        assert clip_grad_norm_(model, 100.0).device == loss.device
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
        model.zero_grad()
    assert losses[-1] < losses[0]
    model.to(f"cuda:{first}")
    with pytest.raises(RuntimeError, match=rf"runs on cuda:1, but its shards are on cuda:{first}"):
        model(*(a.cuda(1) for a in args), **kwargs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(90)
def test_a_model_may_be_on_another_gpu_than_the_current_one() -> None:
    run_ranks(_on_the_second_gpu, 1, timeout=80.0, device="cuda")


class _Gather:
    """Gathers on the stream of torch's process group, and returns without a wait."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)


def _gather_by_torch(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for unit in model.units():
        unit.set_custom_all_gather(_Gather())


def _compare_gathers() -> None:
    expected = _train(lambda model, optimizer: None)
    assert all(map(torch.equal, _train(_gather_by_torch), expected))


@pytest.mark.timeout(90)
def test_a_collective_of_the_user_may_return_before_its_end() -> None:
    run_ranks(_compare_gathers, 2, timeout=80.0, device="cuda")


REPLICAS = [
    test_hybrid_sharding.HYBRID,
    dataclasses.replace(
        test_hybrid_sharding.HYBRID,
        fact="accumulation without all-reduce",
        step=test_hybrid_sharding.accumulate_without_all_reduce,
        fsdp2=test_hybrid_sharding.SUMMED_IN_ANOTHER_ORDER,
    ),
    dataclasses.replace(
        test_hybrid_sharding.HYBRID,
        fact="each unit is a bucket, cut into messages",
        after_sharding=test_hybrid_sharding.cut_into_messages,
    ),
    test_reshard_groups.GROUPED,
    dataclasses.replace(
        test_reshard_groups.GROUPED,
        fact="groups, cut into messages",
        after_sharding=test_hybrid_sharding.cut_into_messages,
    ),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("direct_bytes", [DIRECT, PACKED], ids=["direct", "packed"])
def test_replicas_and_groups_train_as_with_fsdp2(direct_bytes: int, tmp_path: Path) -> None:
    cases = [dataclasses.replace(case, steps=STEPS) for case in REPLICAS]
    train_cases(cases, 4, direct_bytes, tmp_path, timeout=120.0)
