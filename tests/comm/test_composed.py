"""A process group composes its collectives of messages: results, errors and memory.

tests/cpp/composed_test.cpp has the same collectives with threads as ranks.
"""

from __future__ import annotations

import datetime
import os
import random
import re
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ext import _C, describe_buckets, fully_shard
from fsdp_ext.comm import lanes as lanes_module
from fsdp_ext.comm.lanes import lanes_of

HOST = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Elements of a rank: none, one, some within the first message and at its end, several pieces whose
# last one is short, and more pieces than the ring has room for.
NUMELS = [0, 1, 7, 1000, 8192, 8193, 100_003, 1_500_001]
LONG = 300.0  # seconds; much longer than a test may take


def composing_lanes(timeout: float = LONG) -> _C.Lanes:
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    return lanes_of(group, HOST, "process_group")


def filled(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), float("nan"), dtype=dtype)


# - Results


def _differences() -> list[str]:
    """Compare with shared memory, and say what differs."""
    group = dist.group.WORLD
    assert group is not None
    lanes, shared = composing_lanes(), lanes_of(group, HOST, "shared_memory")
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for dtype in DTYPES:
        for numel in NUMELS:
            whole = torch.randn(ranks * numel, generator=generator).to(dtype)
            part = whole[:numel].clone()
            expected_sum, expected = filled(numel, dtype), filled(ranks * numel, dtype)
            shared.reduce_scatter(whole, expected_sum)
            shared.all_gather(part, expected)
            total, gathered = filled(numel, dtype), filled(ranks * numel, dtype)
            lanes.reduce_scatter(whole, total)
            lanes.all_gather(part, gathered)
            if not (torch.equal(total, expected_sum) and torch.equal(gathered, expected)):
                found.append(f"{numel} of {dtype}")
    return found


@pytest.mark.parametrize("world_size", [2, *exhaustive(3, 4)])
def test_results_equal_those_of_shared_memory(world_size: int) -> None:
    assert run_ranks(_differences, world_size) == [[]] * world_size


def _both_lanes_at_once(count: int) -> int:
    """Each lane runs random collectives of its own, with nothing that keeps the lanes in step."""
    lanes = composing_lanes()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []

    def gather() -> None:
        draw = random.Random(1)
        for number in range(count):
            numel = draw.choice([1, 500, 20_000, 400_000])
            output = filled(ranks * numel, torch.float32)
            lanes.all_gather(torch.full((numel,), float(number + rank)), output)
            expected = torch.arange(ranks).repeat_interleave(numel) + number
            wrong.append(int((output != expected).sum()))

    def reduce() -> None:
        draw = random.Random(2)
        for number in range(count):
            numel = draw.choice([1, 500, 20_000, 400_000])
            output = filled(numel, torch.float32)
            lanes.reduce_scatter(torch.full((ranks * numel,), float(number + rank)), output)
            wrong.append(int((output != ranks * number + sum(range(ranks))).sum()))

    threads = [threading.Thread(target=run) for run in (gather, reduce)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 2 * count
    return sum(wrong)


@pytest.mark.parametrize("world_size", [2, *exhaustive(4)])
def test_both_lanes_run_at_once(world_size: int) -> None:
    assert run_ranks(_both_lanes_at_once, world_size, 40) == [0] * world_size


# - Errors


def _mismatch(what: str) -> str:
    lanes = composing_lanes()
    rank = dist.get_rank()
    dtype = torch.bfloat16 if what == "dtypes" and rank else torch.float32
    small = {"sizes": 400_000, "small and large": 40, "dtypes": 400_000}[what]
    numel = (1_600_000 if rank and what != "dtypes" else small) // dtype.itemsize
    part, whole = torch.ones(numel, dtype=dtype), torch.ones(2 * numel, dtype=dtype)
    operation = (
        (lambda: lanes.all_gather(part, whole))
        if what == "sizes"
        else (lambda: lanes.reduce_scatter(whole, part))
    )
    with pytest.raises(RuntimeError) as caught:
        operation()
    return str(caught.value)


def test_ranks_that_send_different_sizes_say_both() -> None:
    first, second = run_ranks(_mismatch, 2, "sizes", timeout=60.0, fresh=True)
    a, b = (
        rf"an all-gather called directly \({nbytes} bytes of each rank, number (\d+) of its lane\)"
        for nbytes in (400_000, 1_600_000)
    )
    assert re.search(f"this rank is in {a}, and rank 1 is in {b}", first), first
    assert re.search(f"this rank is in {b}, and rank 0 is in {a}", second), second


@pytest.mark.parametrize("what", exhaustive("small and large"))
def test_a_small_and_a_large_collective_say_both(what: str) -> None:
    for message in run_ranks(_mismatch, 2, what, timeout=60.0, fresh=True):
        assert "(40 bytes for each rank" in message
        assert "(1600000 bytes for each rank" in message


@pytest.mark.parametrize("what", exhaustive("dtypes"))
def test_ranks_that_send_different_dtypes_raise(what: str) -> None:
    for message in run_ranks(_mismatch, 2, what, timeout=60.0, fresh=True):
        assert "this rank is in a reduce-scatter called directly" in message


def _peer_dies() -> str:
    lanes = composing_lanes()
    if dist.get_rank() == 1:
        # It has sent its first message and takes the payload of none.
        lanes.all_gather(torch.ones(10), torch.ones(20))
        os.kill(os.getpid(), signal.SIGKILL)
    lanes.all_gather(torch.ones(10), torch.ones(20))
    with pytest.raises(RuntimeError) as caught:
        lanes.reduce_scatter(torch.ones(8_000_000), torch.ones(4_000_000))
    return str(caught.value)


def test_a_peer_that_dies_is_named() -> None:
    (message,) = run_ranks(_peer_dies, 2, timeout=60.0, lost=[1])
    assert message.startswith("rank 0: a reduce-scatter called directly failed over the process")
    assert re.search(r"(came from|reached) rank 1: [A-Z]", message), message
    assert re.search(r"Rank 1 \(process \d+\) has ended\.", message), message


def _peer_is_late() -> str:
    lanes = composing_lanes(timeout=2.0)
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            lanes.all_gather(torch.ones(10), torch.ones(20))
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_timeout_names_the_peer() -> None:
    message, _ = run_ranks(_peer_is_late, 2, timeout=60.0, fresh=True)
    assert "No message came from rank 1: " in message
    assert "imed out" in message


# - The description


def _described() -> tuple[bool, Any, str]:
    model: Any = nn.Linear(300, 300)
    fully_shard(model, transport="process_group")
    model(torch.ones(2, 300)).sum().backward()
    root = model._fsdp_ext_unit.root
    return root.lanes.is_composed, root.impl.memory(), describe_buckets(model)


def test_all_collectives_are_composed_and_the_description_says_so() -> None:
    (first, memory, text), (second, _, _) = run_ranks(_described, 2)
    assert first
    assert second
    assert "2 ranks communicate over process_group, which composes collectives of messages" in text
    assert "messages in flight take 4.4 MB" in " ".join(text.split())
    assert memory["message_staging_bytes"] == 4_358_912


def _without_messages() -> str:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    lanes = lanes_module.lanes_of(mesh.get_group(), HOST, "process_group")
    output = torch.ones(4)
    lanes.reduce_scatter(torch.ones(8), output)
    assert not lanes.is_composed
    assert lanes.message_staging_bytes == 0
    return lanes.transport


def test_a_backend_without_messages_takes_its_own_collectives() -> None:
    assert run_ranks(_without_messages, 1, fresh=True) == ["process_group"]
