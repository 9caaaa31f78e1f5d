"""Memory that NCCL knows: windows have NCCL's rules, of 2.28.9 and of 2.30.7."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from support import nccl_library as nccl
from support.devices import IS_EMULATED
from support.emulated import Gate
from support.launcher import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

NUMEL = 1 << 16
BYTES = 4 * NUMEL
# Ranks of one host, in both versions. 2.28.9 refuses two of them on one device.
ON_ONE_HOST = {
    "2.28.9": {"EMULATED_GPU_NCCL": "2.28.9", "EMULATED_GPU_DEVICES": "2", "NCCL_HOSTID": "one"},
    "2.30.7": {"EMULATED_GPU_NCCL": "2.30.7"},
}
VERSIONS = pytest.mark.parametrize("version", list(ON_ONE_HOST))


def _join() -> int:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    assert ".".join(map(str, nccl.version())) == os.environ["EMULATED_GPU_NCCL"]
    return nccl.join()


def _window(comm: int, memory: int, bytes_: int = BYTES) -> tuple[int, int | None]:
    window = ctypes.c_void_p()
    flags = nccl.WIN_COLL_SYMMETRIC
    result = nccl.call("ncclCommWindowRegister", comm, memory, bytes_, ctypes.byref(window), flags)
    return nccl.settle(comm, result), window.value


def _rules() -> None:
    rank = dist.get_rank()
    comm = _join()
    memory = nccl.allocate(NUMEL)
    result, window = _window(comm, memory)
    assert result == nccl.SUCCESS
    assert window is not None

    assert _window(comm, memory, BYTES - 4096 * rank) == (nccl.INVALID_USAGE, None)
    assert f"rank {rank} calls" in nccl.last_error()
    assert f"but rank {1 - rank} calls" in nccl.last_error()
    assert _window(comm, memory + 4, BYTES - 4) == (nccl.INVALID_ARGUMENT, None)
    assert "suitably aligned" in nccl.last_error()
    of_torch = torch.zeros(NUMEL, device="cuda")
    where = of_torch.data_ptr() if rank == 0 else memory
    assert _window(comm, where) == (nccl.UNHANDLED_CUDA, None)
    whose = "not from ncclMemAlloc" if rank == 0 else "has failed on rank 0"
    assert whose in nccl.last_error()

    assert nccl.call("ncclMemFree", memory) == nccl.INVALID_USAGE
    assert "has a window" in nccl.last_error()
    assert nccl.call("ncclCommWindowDeregister", comm, 12345) == nccl.INVALID_USAGE
    assert nccl.call("ncclCommWindowDeregister", comm, window) == nccl.SUCCESS
    assert nccl.call("ncclCommWindowDeregister", comm, window) == nccl.INVALID_USAGE
    assert _window(comm, memory)[0] == nccl.SUCCESS
    assert nccl.call("ncclCommDestroy", comm) == nccl.INVALID_USAGE
    assert "1 windows were not deregistered" in nccl.last_error()
    assert nccl.call("ncclMemFree", memory) == nccl.SUCCESS
    assert nccl.call("ncclMemFree", memory) == nccl.UNHANDLED_CUDA


@VERSIONS
def test_windows_have_rules(version: str) -> None:
    run_ranks(_rules, 2, device="cuda", variables=ON_ONE_HOST[version])


def _gathers_in_windows(is_misplaced: bool) -> None:
    comm = _join()
    memory = [nccl.allocate(NUMEL) for _ in range(3)]
    made = [ctypes.c_void_p() for _ in memory[:2]]
    nccl.call("ncclGroupStart")
    for one, window in zip(memory, made, strict=False):
        to, flags = ctypes.byref(window), nccl.WIN_COLL_SYMMETRIC
        assert nccl.call("ncclCommWindowRegister", comm, one, BYTES, to, flags) == nccl.SUCCESS
    assert nccl.call("ncclGroupEnd") == nccl.SUCCESS
    windows = [window.value for window in made]
    assert None not in windows
    leaves = dist.get_rank() if is_misplaced else 0
    nccl.call("ncclCommWindowDeregister", comm, windows[leaves])
    assert _window(comm, memory[2])[0] == nccl.SUCCESS
    source = torch.full((4,), 1.0 + dist.get_rank(), device="cuda")
    assert nccl.all_gather(comm, source.data_ptr(), memory[2], 4) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert list((ctypes.c_float * 8).from_address(memory[2])) == [1.0] * 4 + [2.0] * 4


@VERSIONS
def test_outputs_in_symmetric_windows_are_gathered(version: str) -> None:
    run_ranks(_gathers_in_windows, 2, False, device="cuda", variables=ON_ONE_HOST[version])


def _in_a_symmetric_kernel() -> tuple[int, str]:
    comm = _join()
    memory = [nccl.allocate(NUMEL) for _ in range(2)]
    windows = [_window(comm, one)[1] for one in memory]
    assert None not in windows
    result = nccl.all_gather(comm, memory[0], memory[1], 4)
    return result, nccl.last_error()


# These kernels would not wait for the work before them.
def test_symmetric_kernels_are_refused_before_2_30_7() -> None:
    found = run_ranks(_in_a_symmetric_kernel, 2, device="cuda", variables=ON_ONE_HOST["2.28.9"])
    for result, error in found:
        assert result == nccl.INVALID_USAGE
        assert "all-gather of 4 elements" in error
        assert "may start before the stream's earlier work has ended" in error
    found = run_ranks(_in_a_symmetric_kernel, 2, device="cuda", variables=ON_ONE_HOST["2.30.7"])
    assert [result for result, _ in found] == [nccl.SUCCESS] * 2


def test_windows_at_different_offsets_are_noticed() -> None:
    where = r"has its output in byte 0 of the window at \d+, the other in byte 0 of the window"
    with pytest.raises(RanksFailed, match=where):
        run_ranks(_gathers_in_windows, 2, True, device="cuda", variables=ON_ONE_HOST["2.30.7"])


def _of_two_hosts() -> tuple[bool, int]:
    comm = nccl.join()
    memory = nccl.allocate(NUMEL)
    # Ranks do not wait for each other.
    result, window = _window(comm, memory) if dist.get_rank() == 0 else (nccl.SUCCESS, None)
    assert result == nccl.SUCCESS
    handle = ctypes.c_void_p()
    assert nccl.call("ncclCommRegister", comm, memory, BYTES, ctypes.byref(handle)) == nccl.SUCCESS
    assert nccl.call("ncclCommWindowDeregister", comm, window) == nccl.SUCCESS
    assert nccl.call("ncclMemFree", memory) == nccl.INVALID_USAGE
    assert "has a registered buffer" in nccl.last_error()
    assert nccl.call("ncclCommDeregister", comm, handle.value) == nccl.SUCCESS
    assert nccl.call("ncclCommDeregister", comm, handle.value) == nccl.INVALID_USAGE
    assert nccl.call("ncclMemFree", memory) == nccl.SUCCESS
    assert nccl.call("ncclCommDestroy", comm) == nccl.SUCCESS
    return window is not None, dist.get_rank()


@pytest.mark.parametrize(("version", "is_local"), [("2.28.9", True), ("2.30.7", False)])
def test_ranks_of_two_hosts_share_no_windows(version: str, is_local: bool) -> None:
    hosts = {"EMULATED_GPU_NCCL": version}
    found = run_ranks(_of_two_hosts_named, 2, device="cuda", variables=hosts)
    assert found == [(is_local, 0), (False, 1)]


def _of_two_hosts_named() -> tuple[bool, int]:
    os.environ["NCCL_HOSTID"] = f"host{dist.get_rank()}"
    return _of_two_hosts()


def _frees_too_early(waits: bool) -> None:
    comm = nccl.join()
    memory = nccl.allocate(NUMEL)
    with Gate(torch.cuda.current_stream().cuda_stream) as gate:
        assert nccl.all_gather(comm, memory, memory, NUMEL) == nccl.SUCCESS
        if waits:
            gate.open()
            torch.cuda.synchronize()
        assert nccl.call("ncclMemFree", memory) == nccl.SUCCESS
    assert nccl.call("ncclCommDestroy", comm) == nccl.SUCCESS


def test_freeing_does_not_wait_for_work() -> None:
    run_ranks(_frees_too_early, 1, True, device="cuda")
    with pytest.raises(RanksFailed, match="ended by SIGSEGV"):
        run_ranks(_frees_too_early, 1, False, device="cuda")
