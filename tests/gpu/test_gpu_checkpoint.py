"""Checkpoints of models on a GPU, while copies are in flight on a stream of their own."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_ext import checkpoint, fully_shard, optim
from fsdp_ext.checkpoint import background, loading
from fsdp_ext.checkpoint.background import CopyGroup
from fsdp_ext.checkpoint.snapshot import Snapshot
from fsdp_ext.checkpoint.transfers import new_for_reading

pytest.importorskip("xxhash", reason="the machine has no network to install it")


ATTACHED = "an attached AdamW"


def made(seed: int, offload: bool, kind: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(3)]
    model: Any = nn.Sequential(*layers).cuda()
    options: Any = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = (optim.AdamW if kind == ATTACHED else kind)(model.parameters(), lr=0.1)
    if kind == ATTACHED:
        optimizer.attach(model)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 32, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies on the host of all weights and states."""
    found = dict(model.state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{key}/{name}": value for name, value in state.items()}
    whole = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in found.items()}
    return {name: value.detach().cpu().clone() for name, value in whole.items()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def _saves_and_loads(place: Path, offload: bool, kind: Any) -> None:
    model, optimizer = made(0, offload, kind)
    expected = [state_of(model, optimizer)]
    checkpoint.save(place / "whole", model, optimizer)
    for _ in range(3):
        saving = checkpoint.async_save(place / "async", model, optimizer)
        step(model, optimizer)  # while the copies are made
        expected.append(state_of(model, optimizer))
        saving.result()
    other, its_optimizer = made(1, offload, kind)
    checkpoint.load(place / "whole", other, its_optimizer)
    assert_equal(state_of(other, its_optimizer), expected[0])
    for number, state in enumerate(expected[:3], start=1):
        checkpoint.load(place / f"async/checkpoint-{number:06}", other, its_optimizer)
        assert_equal(state_of(other, its_optimizer), state)
    step(other, its_optimizer)


@pytest.mark.parametrize(
    ("offload", "kind"),
    [
        (False, optim.AdamW),
        (False, ATTACHED),
        (False, torch.optim.AdamW),
        (False, torch.optim.SGD),
        (True, torch.optim.AdamW),
    ],
)
def test_a_checkpoint_has_what_was_there_at_the_call(
    tmp_path: Path, offload: bool, kind: Any
) -> None:
    run_ranks(_saves_and_loads, 1, tmp_path, offload, kind, device="cuda")


def _saves_from_another_gpu(place: Path) -> None:
    torch.cuda.set_device(1)
    model, optimizer = made(0, False, optim.AdamW)
    other, its_optimizer = made(1, False, optim.AdamW)
    torch.cuda.set_device(0)
    expected = state_of(model, optimizer)
    set_stream, set_in_thread = torch.cuda.set_stream, set()

    def note_device(stream: torch.cuda.Stream) -> None:
        if threading.current_thread() is not threading.main_thread():
            set_in_thread.add(stream.device)  # setting a stream makes a context on its device
        set_stream(stream)

    torch.cuda.set_stream = note_device
    saving = checkpoint.async_save(place, model, optimizer)
    with torch.cuda.device(1):
        step(model, optimizer)
    saving.result()
    torch.cuda.set_stream = set_stream
    assert set_in_thread == {torch.device("cuda", 1)}
    checkpoint.load(place, other, its_optimizer)
    assert_equal(state_of(other, its_optimizer), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_may_be_saved_from_another_gpu_than_the_current_one(tmp_path: Path) -> None:
    run_ranks(_saves_from_another_gpu, 1, tmp_path, device="cuda")


def _grows(place: Path) -> None:
    model, optimizer = made(0, False, torch.optim.SGD)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for kind in (torch.optim.SGD, torch.optim.AdamW):  # the second has more to copy
        optimizer = kind(model.parameters())
        step(model, optimizer)
        checkpoint.async_save(place, model, optimizer).result()
        copies = [memory.nbytes for memory in background._memory[model].values()]
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
        assert pinned == sum(1 << (nbytes - 1).bit_length() for nbytes in copies), (pinned, copies)


def test_copies_that_grow_leave_no_pinned_memory_behind(tmp_path: Path) -> None:
    run_ranks(_grows, 1, tmp_path, device="cuda")


def _reads_into_pinned_memory(place: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = fully_shard(nn.Linear(1024, 512, device="cuda"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, other = made(0), made(1)
    checkpoint.save(place, *saved)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pinned: list[bool] = []

    def noted(like: Tensor, dtype: torch.dtype) -> Tensor:
        new = new_for_reading(like, dtype)
        pinned.append(new.is_pinned())
        return new

    loading.new_for_reading = noted
    checkpoint.load(place, *other)
    assert sorted(pinned) == [False] * 5 + [True] * 3  # the weight and its two moments
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    assert_equal(state_of(*other), state_of(*saved))


def test_a_load_reads_large_tensors_into_pinned_memory_and_gives_it_back(tmp_path: Path) -> None:
    run_ranks(_reads_into_pinned_memory, 1, tmp_path, device="cuda", fresh=True)


PLAIN = "plain"
CAPTURED_BEFORE = "plain, captured before fsdp_ext was imported"


def _saves_between_replays(place: Path, kind: str) -> None:
    adamw = partial(torch.optim.AdamW, capturable=True)
    if kind == "sharded":
        model, optimizer = made(0, False, adamw)
    else:
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).cuda()
        optimizer = adamw(model.parameters(), lr=0.1)
    x = torch.randn(8, 32, device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    graph.replay()
    expected = state_of(model, optimizer)

    copy, go_on = CopyGroup.copy, threading.Event()

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        copy(group, source, target)

    CopyGroup.copy = copy_late
    if kind == CAPTURED_BEFORE:
        background._stepped.discard(optimizer)
        background._captured.discard(optimizer)
    saving = checkpoint.async_save(place, model, optimizer)
    graph.replay()
    torch.cuda.synchronize()
    go_on.set()
    saving.result()
    checkpoint.load(place, model, optimizer)
    assert_equal(state_of(model, optimizer), expected)


@pytest.mark.parametrize("kind", ["sharded", PLAIN, CAPTURED_BEFORE])
def test_replays_do_not_change_what_is_saved(tmp_path: Path, kind: str) -> None:
    run_ranks(_saves_between_replays, 1, tmp_path, kind, device="cuda")
