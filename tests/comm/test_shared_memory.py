"""Ranks of one host share memory: results, the choice of the transport, and lost ranks.

tests/cpp/shared_memory_test.cpp has the collectives themselves, with threads as ranks. All other
tests train over this transport, too.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ext import _C, _build_info, fully_shard
from fsdp_ext.__main__ import describe, main
from fsdp_ext.comm import lanes, rendezvous, transports
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.meeting import store_of_attempt
from fsdp_ext.comm.roll_call import call_roll

HOST = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TIMEOUT = 2.0


def lanes_with(timeout: float = 60.0) -> _C.Lanes:
    """Return lanes that wait for peers for at most `timeout` seconds."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    return lanes_of(group, HOST, "shared_memory")


def shared(tensor: Tensor) -> Tensor:
    """Return a copy that peers can read."""
    memory = _C.shared_zeros(max(1, tensor.nbytes))[: tensor.nbytes].view(tensor.dtype)
    return memory.copy_(tensor)


def whole_numbers(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return small whole numbers, whose sums are exact in every dtype."""
    return ((torch.arange(numel) * 5 + seed + 3 * rank) % 7).to(dtype)


# - Results


def _random_collectives(count: int) -> int:
    """Run random collectives, the same on all ranks, each rank with delays of its own."""
    lanes = lanes_with()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw, own = random.Random(0), random.Random(rank)
    wrong = 0
    for _ in range(count):
        op = draw.choice(["all_gather", "reduce_scatter", "all_reduce"])
        dtype, seed = draw.choice(DTYPES), draw.randrange(100)
        numel = draw.randrange(1, 200000 if draw.random() < 0.1 else 2000)
        place: Callable[[Tensor], Tensor] = draw.choice([shared, torch.clone])
        if draw.random() < 0.2:
            time.sleep(own.random() * 1e-3)

        def of(who: int, numel: int = numel, seed: int = seed, d: torch.dtype = dtype) -> Tensor:
            return whole_numbers(seed, who, numel, d)

        if op == "all_gather":
            output = torch.full((ranks * numel,), float("nan"), dtype=dtype)
            lanes.all_gather(place(of(rank)), output)
            expected = torch.cat([of(r) for r in range(ranks)])
        elif op == "reduce_scatter":
            output = torch.full((numel,), float("nan"), dtype=dtype)
            lanes.reduce_scatter(place(of(rank, ranks * numel)), output)
            sums = torch.stack([of(r, ranks * numel) for r in range(ranks)]).sum(0)
            expected = sums.view(ranks, numel)[rank]
        else:
            output = place(of(rank))
            lanes.all_reduce(output)
            expected = torch.stack([of(r) for r in range(ranks)]).sum(0)
        wrong += int((output != expected).sum())
    return wrong


@pytest.mark.parametrize("world_size", [2, *exhaustive(5)])
def test_random_collectives_give_no_wrong_element(world_size: int) -> None:
    assert run_ranks(_random_collectives, world_size, 1000) == [0] * world_size


def _sums() -> list[Tensor]:
    lanes = lanes_with()
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = []
    for dtype in DTYPES:
        data = torch.randn(5000, generator=generator).to(dtype)
        inputs = [torch.empty_like(data) for _ in range(dist.get_world_size())]
        dist.all_gather(inputs, data)
        lanes.all_reduce(data)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = inputs[0].to(wide)
        for part in inputs[1:]:
            expected = expected + part.to(wide)
        torch.testing.assert_close(data, expected.to(dtype), rtol=0, atol=0)
        results.append(data)
    return results


def test_sums_are_in_rank_order_and_the_same_on_every_rank() -> None:
    first, *others = run_ranks(_sums, 3)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def _train_in_subgroups() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"], transport="shared_memory")
    fully_shard(model, mesh=mesh["shard"], transport="shared_memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("shard"))
    losses = []
    for _ in range(4):
        loss = model(torch.randn(3, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_subgroups_train_by_themselves() -> None:
    losses = run_ranks(_train_in_subgroups, 4)
    # Ranks 0 and 2 have the same place in their groups, and the same data.
    assert losses[0] == losses[2]
    assert losses[1] == losses[3]
    assert losses[0] != losses[1]


def _memory_after_models() -> list[int]:
    sizes = []
    for _ in range(4):
        model: Any = nn.Linear(300, 300)
        fully_shard(model)
        model(torch.ones(2, 300)).sum().backward()
        del model
        gc.collect()
        sizes.append(_C.shared_memory_bytes())
    return sizes


def test_memory_of_models_that_are_gone_comes_back() -> None:
    for sizes in run_ranks(_memory_after_models, 2):
        assert sizes[-1] == sizes[0]


# - Choice


def _transport(asked: str | None) -> tuple[str, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for model in models:
        fully_shard(model, transport=asked)
        model(torch.ones(2, 4)).sum().backward()
    group = models[0]._fsdp_ext_unit.ranks.shard_group  # type: ignore[operator]
    resolved = transports.resolve_transport(asked, "cpu")
    return lanes_of(group, HOST, resolved).transport, records


@pytest.mark.parametrize("asked", [None, "shared_memory", "process_group"])
def test_the_transport_is_chosen_and_logged_once(asked: str | None) -> None:
    (chosen, records), (_, others) = run_ranks(_transport, 2, asked)
    assert chosen == (asked or "shared_memory")
    assert [line.split(",")[0] for line in records] == [f"2 ranks communicate over {chosen}"]
    assert others == []


def _transport_of_environment(name: str) -> str:
    os.environ[transports.VARIABLE] = name
    return _transport(None)[0]


def test_the_environment_chooses_the_transport() -> None:
    assert run_ranks(_transport_of_environment, 2, "process_group") == ["process_group"] * 2


def _disagree() -> None:
    os.environ[transports.VARIABLE] = "process_group" if dist.get_rank() else "shared_memory"
    with pytest.raises(RuntimeError, match=r"asks for .* and rank .* for .*the same value on all"):
        _transport(None)


def test_ranks_that_ask_for_different_transports_say_so() -> None:
    run_ranks(_disagree, 2)


MISSPELT = (("shared-memory", "shared_memory"), ("ProcessGroup", "process_group"))


def _wrong_names() -> None:
    for wrong, meant in (("gloo", "process_group"), ("shm", "shared_memory"), *MISSPELT):
        with pytest.raises(ValueError, match=rf"is '{wrong}', but .* Did you mean '{meant}'\?"):
            fully_shard(nn.Linear(2, 2), transport=wrong)
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0], transport="process_group")
    fully_shard(model, transport="shared_memory")
    with pytest.raises(ValueError, match="2 transports, 'process_group' and 'shared_mem"):
        model(torch.ones(1, 2))
    os.environ[transports.VARIABLE] = "pigeons"
    with pytest.raises(ValueError, match=r"FSDP_EXT_TRANSPORT is 'pigeons', but"):
        fully_shard(nn.Linear(2, 2))


def test_wrong_names_of_transports_are_refused() -> None:
    run_ranks(_wrong_names, 1)


def _chosen(asked: str | None) -> str:
    """Return the transport and the warnings, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            chosen, _ = _transport(asked)
        except RuntimeError as error:
            return str(error)
        said = [str(w.message) for w in caught if "fsdp_ext" in str(w.message)]
    return f"{chosen}: {said}"


def _without_memory(asked: str | None) -> str:
    """Choose a transport while rank 1 cannot have shared memory."""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return _chosen(asked)


def test_without_shared_memory_the_process_group_takes_over() -> None:
    for answer in run_ranks(_without_memory, 2, None, fresh=True):
        assert answer.startswith("process_group")
        assert "fsdp_ext uses the process group's own collectives" in answer
        assert "rank 1: Shared memory could not reserve" in answer


def test_shared_memory_asked_for_by_name_is_used_or_an_error() -> None:
    for message in run_ranks(_without_memory, 2, "shared_memory", fresh=True):
        assert "transport 'shared_memory' is not possible here: rank 1" in message


def _on_two_machines(asked: str | None) -> str:
    place = f"machine {dist.get_rank()}"
    with mock.patch.object(transports, "machine", return_value=place):
        return _chosen(asked)


def test_ranks_on_two_machines_use_the_process_group_without_a_warning() -> None:
    assert run_ranks(_on_two_machines, 2, None) == ["process_group: []"] * 2


def test_shared_memory_by_name_between_two_machines_is_an_error() -> None:
    for message in run_ranks(_on_two_machines, 2, "shared_memory"):
        assert message.startswith(
            "transport 'shared_memory' is not possible here: its 2 ranks are on 2 machines."
        )


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_module_shows_the_transports(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(variable: str) -> list[str]:
        monkeypatch.setenv("FSDP_EXT_TRANSPORT", variable)
        assert main() == 0
        lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
        transports = {name: text for name, text in lines if name.startswith("transport ")}
        assert [*transports] == ["transport of GPUs"] * has_gpu + ["transport on the host"]
        return [*transports.values()]

    monkeypatch.setattr(_build_info, "BUILD_KIND", "CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["fsdp_ext"])
    *of_gpus, on_host = shown("")
    assert of_gpus == ["nccl"] * has_gpu
    assert on_host.startswith("shared_memory between ranks of one host")
    *of_gpus, on_host = shown("nccl")
    assert of_gpus == ["nccl (FSDP_EXT_TRANSPORT)"] * has_gpu
    assert on_host.startswith("none: FSDP_EXT_TRANSPORT is 'nccl', but ranks on 'cpu' can use ")
    *of_gpus, on_host = shown("process_group")
    assert all(text.startswith("none: FSDP_EXT_TRANSPORT is ") for text in of_gpus)
    assert on_host == "process_group (FSDP_EXT_TRANSPORT)"


def test_the_module_says_what_keeps_gpus_from_being_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_kernels(gpu: int) -> None:
        raise RuntimeError(f"This build of fsdp_ext has no kernels for GPU {gpu}.")

    monkeypatch.setattr(_build_info, "BUILD_KIND", "CPU")
    monkeypatch.setattr(torch.version, "cuda", None)
    for library, is_missing in ((None, False), ("libcuda.so.1", True)):
        monkeypatch.setattr("fsdp_ext.__main__.find_library", lambda name, it=library: it)
        assert ("install a torch with CUDA" in describe().get("missing", "")) == is_missing
    monkeypatch.setattr(_build_info, "BUILD_KIND", "CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("fsdp_ext._C.Packer", without_kernels)
    assert describe()["GPU"] == "Some GPU. This build of fsdp_ext has no kernels for GPU 0."


def _nobody_there() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model = nn.Linear(4, 4)
    fully_shard(model, transport="shared_memory")
    with pytest.raises(RuntimeError, match=r"backend 'fake' has none"):
        model(torch.ones(1, 4))


def test_ranks_that_do_not_exist_share_no_memory() -> None:
    run_ranks(_nobody_there, 1)


def _group_of_several_backends() -> str:
    group = dist.new_group(backend="cpu:gloo")
    return lanes_of(group, HOST).transport


def test_ranks_whose_group_has_a_backend_a_device_share_memory() -> None:
    # A group has one backend for each device by default, and no single name for them.
    assert run_ranks(_group_of_several_backends, 2) == ["shared_memory"] * 2


def _connect_again_and_again() -> list[list[float]]:
    group = dist.new_group()
    results = []
    for attempt in range(4):
        if attempt and dist.get_rank() == 1:
            time.sleep(0.1)  # rank 0 waits meanwhile, and must not find what rank 1 left before
        whole = torch.empty(2)
        lanes_of(group, HOST).all_gather(torch.tensor([10.0 * attempt + dist.get_rank()]), whole)
        results.append(whole.tolist())
        lanes._lanes.clear()
    return results


def test_ranks_that_connect_again_do_not_find_what_they_left() -> None:
    for results in run_ranks(_connect_again_and_again, 2):
        assert results == [[10.0 * attempt, 10.0 * attempt + 1] for attempt in range(4)]


def _find_what_another_rendezvous_left() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    call_roll({group: HOST}, "a call")
    store = store_of_attempt(group)
    assert store is not None
    if dist.get_rank() == 1:
        left = os.urandom(rendezvous._RANDOM_BYTES) + rendezvous._version() + os.urandom(200)
        store.set("offer/0", left.hex())
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    with pytest.raises(RuntimeError, match=r"waited 2 s for rank \d to begin the first forward"):
        lanes_of(group, HOST)


@pytest.mark.exhaustive
def test_ranks_in_different_rendezvous_say_so() -> None:
    run_ranks(_find_what_another_rendezvous_left, 2, fresh=True)


# - Ranks that go missing


def _gather_for_ever(lanes: _C.Lanes) -> str:
    """Gather until an error ends it, and return the error."""
    part = shared(torch.ones(100_000))
    whole = torch.empty(dist.get_world_size() * 100_000)
    try:
        while True:
            lanes.all_gather(part, whole)
    except RuntimeError as error:
        return str(error)


def _lose_a_rank(how: str) -> str:
    """Lose rank 1, a child of the launcher's, during all-gathers or before them.

    Returns:
        The error on each of the other ranks, and the error on rank 1 if it comes back.
    """
    rank = dist.get_rank()
    ours, theirs = multiprocessing.Pipe()
    child = os.fork() if rank == 1 else None
    if child == 0:
        endpoint = _C.SharedMemoryEndpoint(1)
        theirs.send(endpoint.address())
        lanes = _C.Lanes.shared_memory(endpoint, theirs.recv(), 1, TIMEOUT, TIMEOUT + 10)
        theirs.send(_gather_for_ever(lanes))
        del lanes
        ctypes.CDLL(None).exit(0)  # a process that nobody kills ends like this
    endpoint = _C.SharedMemoryEndpoint(rank)
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, ours.recv() if rank == 1 else endpoint.address())
    if child is None:
        lanes = _C.Lanes.shared_memory(endpoint, addresses, rank, TIMEOUT, TIMEOUT + 10)
        if how == "gives up":
            dist.barrier()
        return _gather_for_ever(lanes)
    ours.send(addresses)
    if how == "gives up":
        os.waitpid(child, 0)
        dist.barrier()
        return str(ours.recv())
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
    if how == "is killed":
        os.waitpid(child, 0)
        return ""
    time.sleep(2 * TIMEOUT)
    os.kill(child, signal.SIGCONT)
    return str(ours.recv())


@pytest.mark.exhaustive
def test_a_rank_that_gave_up_and_ended_is_still_heard() -> None:
    # Rank 1 waited for the others, which arrive when it is gone.
    for message in run_ranks(_lose_a_rank, 3, "gives up", timeout=60.0, fresh=True):
        assert message.startswith("rank 1: waited 2000 ms for rank ")
        assert "has ended" not in message


def test_a_rank_that_is_killed_is_named_by_the_others() -> None:
    messages = run_ranks(_lose_a_rank, 3, "is killed", timeout=60.0, fresh=True)
    for rank in (0, 2):
        assert "rank 1 (process" in messages[rank]
        assert "has ended before or during an all-gather called directly" in messages[rank]


def test_a_rank_that_is_stopped_is_named_by_the_others_and_hears_of_it() -> None:
    messages = run_ranks(_lose_a_rank, 3, "is stopped", timeout=60.0, fresh=True)
    for message in messages:
        assert "waited 2000 ms for rank 1 (process" in message
        assert "which is stopped) to take part in an all-gather called directly" in message


def _killed_at_once() -> None:
    _C.SharedMemoryEndpoint(dist.get_rank())
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RanksFailed):
        run_ranks(_killed_at_once, 2, timeout=30.0, fresh=True)
    run_ranks(_transport, 2, "shared_memory", fresh=True)
    assert set(os.listdir("/dev/shm")) <= before


def _train_until_a_rank_dies() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu")
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, bucket_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(1000):
            if step == 5 and dist.get_rank() == 1:
                time.sleep(2 * TIMEOUT)  # like a rank that hangs
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"waited .*rank 1 .*unit '(0|1|the root)'"):
        train()


def test_training_names_the_rank_and_the_unit() -> None:
    run_ranks(_train_until_a_rank_dies, 3, timeout=90.0, fresh=True)
