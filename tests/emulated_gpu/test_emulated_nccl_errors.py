"""Errors of NCCL's calls: aborts, revocation, remote failures, groups and non-blocking calls."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from support import nccl_library as nccl
from support.devices import IS_EMULATED
from support.launcher import run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

END_S = 15.0
BYTES_OF_2_18 = 48  # of ncclConfig_t


def _ones(numel: int = 8) -> torch.Tensor:
    return torch.ones(numel, device="cuda")


def _split(comm: int, color: int, settings: nccl.Config | None = None) -> tuple[int, int | None]:
    part = ctypes.c_void_p()
    given = ctypes.byref(settings) if settings is not None else None
    key = dist.get_rank()
    result = nccl.call("ncclCommSplit", comm, color, key, ctypes.byref(part), given)
    return nccl.settle(comm, result), part.value


def _split_and_sum(comm: int, settings: nccl.Config | None = None) -> int:
    """Return a part of all ranks, which sums."""
    result, part = _split(comm, 0, settings)
    assert result == nccl.SUCCESS
    assert part is not None
    values = _ones()
    assert nccl.all_reduce(part, values) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert values[0].item() == 2
    return part


def _abort_from_another_thread() -> None:
    comm = nccl.join()
    data = _ones()
    if dist.get_rank() == 0:
        streams = [torch.cuda.Stream() for _ in range(2)]
        both = [_ones(), _ones()]
        torch.cuda.synchronize()
        for values, stream in zip(both, streams, strict=True):
            assert nccl.all_reduce(comm, values, stream) == nccl.SUCCESS
        result: list[int] = []
        aborter = threading.Thread(target=lambda: result.append(nccl.call("ncclCommAbort", comm)))
        assert not streams[0].query()
        aborter.start()
        torch.cuda.synchronize()  # it would wait for ever
        aborter.join(END_S)
        assert result == [nccl.SUCCESS]
        assert nccl.all_reduce(comm, data) == nccl.INVALID_ARGUMENT
        assert "was destroyed or aborted" in nccl.last_error()
        assert nccl.call("ncclCommAbort", comm) == nccl.INVALID_ARGUMENT
    nccl.meet()
    if dist.get_rank() == 1:
        # Rank 0 has closed its connections.
        assert nccl.all_reduce(comm, data) == nccl.SUCCESS
        assert nccl.next_error(comm) == nccl.REMOTE
        assert "Connection closed by rank 0 of 2" in nccl.last_error()
        assert nccl.call("ncclCommAbort", comm) == nccl.SUCCESS
        torch.cuda.synchronize()


def test_an_abort_ends_all_waits_and_peers_learn_it() -> None:
    run_ranks(_abort_from_another_thread, 2, device="cuda")


def _revoke() -> None:
    rank = dist.get_rank()
    comm = nccl.join()
    data = _ones()
    if rank == 0:
        assert nccl.all_reduce(comm, data) == nccl.SUCCESS
    assert nccl.call("ncclCommRevoke", comm, 1) == nccl.INVALID_ARGUMENT  # no such flags
    assert nccl.call("ncclCommRevoke", comm, 0) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert nccl.all_reduce(comm, data) == nccl.INVALID_USAGE
    assert "communicator was revoked" in nccl.last_error()
    assert nccl.poll(comm) == nccl.SUCCESS
    assert nccl.call("ncclCommRevoke", comm, 0) == nccl.INVALID_ARGUMENT
    # A revoked communicator can be split.
    part = _split_and_sum(comm)
    for one in (part, comm):
        assert nccl.call("ncclCommDestroy", one) == nccl.SUCCESS


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_a_revoked_communicator_can_only_be_split(version: str) -> None:
    run_ranks(_revoke, 2, device="cuda", variables={"EMULATED_GPU_NCCL": version})


def _death_of_a_rank() -> None:
    comm = nccl.join()
    nccl.meet()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert nccl.all_reduce(comm, _ones()) == nccl.SUCCESS
    assert nccl.next_error(comm) == nccl.REMOTE
    # A child cannot be made, and this ends instead of waiting.
    assert _split(comm, 0)[0] == nccl.REMOTE
    assert nccl.call("ncclCommAbort", comm) == nccl.SUCCESS


def test_the_death_of_a_rank_is_a_remote_error() -> None:
    run_ranks(_death_of_a_rank, 2, device="cuda", lost=[1])


def _without_blocking() -> None:
    rank = dist.get_rank()
    comm = ctypes.c_void_p()
    id_ = nccl.unique_id()
    settings = nccl.config(blocking=0)
    if rank == 1:
        nccl.meet()
    begin = ("ncclCommInitRankConfig", ctypes.byref(comm), 2, id_, rank, ctypes.byref(settings))
    assert nccl.call(*begin) == nccl.IN_PROGRESS
    assert comm.value is not None
    if rank == 0:
        assert nccl.poll(comm.value) == nccl.IN_PROGRESS
        assert nccl.all_reduce(comm.value, _ones()) == nccl.INVALID_ARGUMENT
        assert "before the previous operation returned" in nccl.last_error()
        nccl.meet()
    assert nccl.settle(comm.value) == nccl.SUCCESS
    # The end of a group also returns at once, with both of its collectives.
    data = [_ones(), _ones()]
    torch.cuda.synchronize()
    assert nccl.call("ncclGroupStart") == nccl.SUCCESS
    for values in data:
        assert nccl.all_reduce(comm.value, values) in (nccl.SUCCESS, nccl.IN_PROGRESS)
    assert nccl.call("ncclGroupEnd") == nccl.IN_PROGRESS
    assert nccl.settle(comm.value) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert [values[0].item() for values in data] == [2, 2]
    # The child has settings of its own.
    part = _split_and_sum(comm.value, nccl.config(blocking=1))
    assert nccl.call("ncclCommFinalize", comm.value) == nccl.IN_PROGRESS
    assert nccl.settle(comm.value) == nccl.SUCCESS
    assert nccl.call("ncclCommFinalize", comm.value) == nccl.INVALID_ARGUMENT
    for one in (part, comm.value):
        assert nccl.call("ncclCommDestroy", one) == nccl.SUCCESS


def test_calls_that_do_not_block_are_in_progress_first() -> None:
    run_ranks(_without_blocking, 2, device="cuda")


def _groups() -> None:
    rank = dist.get_rank()
    assert nccl.call("ncclGroupEnd") == nccl.INVALID_USAGE  # of no group
    # Two communicators begin in one group, whose end waits for both.
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]
    ids = [nccl.unique_id() for _ in comms]
    nccl.call("ncclGroupStart")
    for comm, id_ in zip(comms, ids, strict=True):
        assert nccl.call("ncclCommInitRank", ctypes.byref(comm), 2, id_, rank) == nccl.SUCCESS
    assert nccl.call("ncclGroupEnd") == nccl.SUCCESS
    first, second = (comm.value for comm in comms)
    assert first is not None
    assert second is not None
    # An inner group ends nothing.
    data = _ones()
    torch.cuda.synchronize()
    nccl.call("ncclGroupStart")
    nccl.call("ncclGroupStart")
    assert nccl.all_reduce(first, data) == nccl.SUCCESS
    assert nccl.call("ncclGroupEnd") == nccl.SUCCESS
    assert torch.cuda.current_stream().query()
    assert data[0].item() == 1
    assert nccl.call("ncclGroupEnd") == nccl.SUCCESS
    torch.cuda.synchronize()
    assert data[0].item() == 2
    # An error of one call is that of the group, and none of its calls have an effect.
    nccl.call("ncclGroupStart")
    assert nccl.all_reduce(first, data) == nccl.SUCCESS
    address, on = data.data_ptr(), torch.cuda.current_stream().cuda_stream
    no_root = ("ncclBroadcast", address, address, 8, nccl.FLOAT32, 2, second, on)
    assert nccl.call(*no_root) == nccl.INVALID_ARGUMENT
    assert "invalid root 2 of 2 ranks" in nccl.last_error()
    assert nccl.call("ncclGroupEnd") == nccl.INVALID_ARGUMENT
    torch.cuda.synchronize()
    assert data[0].item() == 2
    # NCCL refuses a group with blocking and non-blocking communicators.
    other = nccl.join(nccl.config(blocking=0))
    nccl.call("ncclGroupStart")
    nccl.all_reduce(first, data)
    nccl.all_reduce(other, data)
    assert nccl.call("ncclGroupEnd") == nccl.INVALID_ARGUMENT
    assert "not allowed in the same group" in nccl.last_error()
    for one in (first, second, other):
        assert nccl.call("ncclCommDestroy", one) == nccl.SUCCESS


def test_groups() -> None:
    run_ranks(_groups, 2, device="cuda")


def _settings() -> None:
    id_ = nccl.UniqueId()
    assert nccl.call("ncclGetUniqueId", ctypes.byref(id_)) == nccl.SUCCESS

    def begin(settings: nccl.Config, rank: int = 0) -> int:
        comm = ctypes.c_void_p()
        begun = ("ncclCommInitRankConfig", ctypes.byref(comm), 1, id_, rank)
        result = nccl.call(*begun, ctypes.byref(settings))
        if result == nccl.SUCCESS:
            assert nccl.call("ncclCommDestroy", comm.value) == nccl.SUCCESS
        return result

    assert begin(nccl.config(minCTAs=2, maxCTAs=4)) == nccl.SUCCESS
    assert begin(nccl.config(), rank=1) == nccl.INVALID_ARGUMENT
    for fields in ({"blocking": 2}, {"minCTAs": 4}, {"minCTAs": 4, "maxCTAs": 2}, {"CTAPolicy": 5}):
        assert begin(nccl.config(**fields)) == nccl.INVALID_ARGUMENT, fields
    # NCCL ignores fields that are newer than the version that the caller states.
    older = nccl.config(CTAPolicy=5)
    older.version = 22600
    assert begin(older) == nccl.SUCCESS
    older.size = BYTES_OF_2_18
    older.CTAPolicy = 7
    assert begin(older) == nccl.SUCCESS
    wrong = nccl.config()
    wrong.magic = 1
    assert begin(wrong) == nccl.INVALID_ARGUMENT
    assert "NCCL_CONFIG_INITIALIZER" in nccl.last_error()


def test_settings_are_checked_as_the_callers_version_means_them() -> None:
    run_ranks(_settings, 1, device="cuda")


def _shrink() -> None:
    rank = dist.get_rank()
    comm = nccl.join()
    excluded = (ctypes.c_int * 1)(1)
    if rank == 0:
        assert nccl.all_reduce(comm, _ones()) == nccl.SUCCESS  # rank 1 does not come
    part = ctypes.c_void_p()
    given = ("ncclCommShrink", comm, ctypes.byref(excluded), 1, ctypes.byref(part), None, 1)
    if rank == 1:
        assert nccl.call(*given) == nccl.INVALID_ARGUMENT
    else:
        assert nccl.call(*given) == nccl.SUCCESS, nccl.last_error()
        data = _ones()
        assert nccl.all_reduce(part.value, data) == nccl.SUCCESS
        torch.cuda.synchronize()
        assert data[0].item() == 2
        assert nccl.call("ncclCommDestroy", part.value) == nccl.SUCCESS
    nccl.meet()
    assert nccl.call("ncclCommAbort", comm) == nccl.SUCCESS


def test_ranks_go_on_without_one_of_them() -> None:
    run_ranks(_shrink, 3, device="cuda")


def _all_in_one_process() -> None:
    comms = (ctypes.c_void_p * 2)()
    assert nccl.call("ncclCommInitAll", comms, 2, None) == nccl.SUCCESS
    data = [torch.full((4,), 1.0 + device, device=f"cuda:{device}") for device in range(2)]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    nccl.call("ncclGroupStart")
    for device, comm in enumerate(comms):
        with torch.cuda.device(device):
            assert nccl.all_reduce(comm, data[device]) == nccl.SUCCESS
    assert nccl.call("ncclGroupEnd") == nccl.SUCCESS
    for device, comm in enumerate(comms):
        torch.cuda.synchronize(device)
        assert data[device].tolist() == [3.0] * 4
        assert nccl.call("ncclCommDestroy", comm) == nccl.SUCCESS


def test_one_process_may_have_all_ranks() -> None:
    two = {"EMULATED_GPU_DEVICES": "2"}
    run_ranks(_all_in_one_process, 1, timeout=30.0, device="cuda", variables=two)
